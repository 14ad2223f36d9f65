"""Progress, metrics, times and speeds: numbers that ranks measure, and how they become one.
Both."""

"""Run calls in worker processes. Both."""

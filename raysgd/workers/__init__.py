"""Processes that run calls on a replica. Only this package and `tune` import Ray. Both."""

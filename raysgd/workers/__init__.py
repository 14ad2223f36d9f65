"""Processes that run calls on what they host. With tune.py, the only place that imports ray."""

"""The one place that knows which release this is; setup.py reads it without importing the package."""

__version__ = "0.1.0"

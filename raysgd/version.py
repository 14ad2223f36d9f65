"""The one place that knows which release this is, and where its documentation is; setup.py reads it
without importing the package. Both."""

__version__ = "0.1.0"
__documentation__ = "https://raysgd.readthedocs.io/en/latest/"


def page(name: str) -> str:
    """Return the address of a page of the documentation."""
    return f"{__documentation__}{name}.html"

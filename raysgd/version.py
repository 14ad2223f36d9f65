"""The release, and where its documentation is; setup.py reads it as text. Both."""

__version__ = "0.1.0"
__documentation__ = "https://raysgd.readthedocs.io/en/latest/"


def page(name: str) -> str:
    """Return the address of a page of the documentation."""
    return f"{__documentation__}{name}.html"

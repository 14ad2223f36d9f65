"""The release, and where its documentation and its source are; setup.py reads it as text. Both."""

__version__ = "0.1.0"
__documentation__ = "https://raysgd.readthedocs.io/en/latest/"
__repository__ = ""  # where git can clone it; the pages have a line for that as soon as this is set


def page(name: str) -> str:
    """The address of a page of the documentation."""
    return f"{__documentation__}{name}.html"

"""Ready-made operators, one idea a file: `from raysgd.operators.regression import ...`.

The folder stands at the top of the repository and is installed as `raysgd.operators`. Under a second name its
classes would be other classes than the library's, so any other name is refused here.
"""

if __name__ != "raysgd.operators":
    raise ImportError(
        f"This package was imported as {__name__!r}; its only name is 'raysgd.operators'. "
        "Write `from raysgd.operators.regression import ...` instead."
    )

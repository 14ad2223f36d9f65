"""Ready-made operators, one subject per file: `from raysgd.operators.regression import ...`. Both.

The folder is at the top of the repository, and is installed as `raysgd.operators`. If it were imported under another name,
its classes would exist twice, so it refuses other names.
"""

if __name__ != "raysgd.operators":
    raise ImportError(
        f"this package was imported as {__name__!r}, and its only name is 'raysgd.operators': write "
        "`from raysgd.operators.regression import ...`"
    )

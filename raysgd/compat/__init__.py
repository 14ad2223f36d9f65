"""Names and functions of older libraries, for code that was written for them. Nothing in raysgd
uses them. Both."""

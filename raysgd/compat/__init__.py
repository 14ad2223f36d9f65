"""Old module paths and names, for code that was written for RaySGD. Nothing else in raysgd imports them. Both."""

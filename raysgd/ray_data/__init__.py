"""Ray Datasets as training data. Both."""

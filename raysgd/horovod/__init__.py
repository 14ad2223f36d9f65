"""Horovod as a way to connect ranks and average gradients. Importing this package does not import
Horovod. Both."""

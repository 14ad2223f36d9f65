"""Horovod as a way to connect ranks and average gradients; it is not imported here. Both."""

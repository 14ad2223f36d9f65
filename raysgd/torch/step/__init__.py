"""One step of an operator for PyTorch: what acts in it, in which order, and what user code calls.
Worker."""

"""The state of operators for PyTorch: its content, checks, files and copies. Both."""

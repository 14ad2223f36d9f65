"""How ranks of PyTorch connect, average gradients and give each other their state. Both."""

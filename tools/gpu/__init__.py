"""What raysgd does on GPUs, measured in minutes: `make gpu` (run.py), and what must be carried to a machine for it."""

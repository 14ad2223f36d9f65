"""Where checkpoints are stored, and how files get there complete. Both."""

"""What the torch and the TensorFlow trainers share. Both."""

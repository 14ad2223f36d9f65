"""The trainers of the class API: what the torch and the TensorFlow trainers share. Driver."""

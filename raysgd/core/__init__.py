"""What the driver and its workers have in common, with the standard library only. Both."""

"""Checkpoints of the class API: their content, checks, files and streams. Both."""

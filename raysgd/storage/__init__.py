"""Paths and URIs, durable and remote files, digests, and the folders and archives of checkpoints. Both."""

"""Store files durably: local paths and URIs, digests, and the folders and archives of checkpoints.
Both."""

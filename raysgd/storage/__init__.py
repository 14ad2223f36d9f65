"""Store files durably: paths and URIs, digests, folders and archives. Both."""

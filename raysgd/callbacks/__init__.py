"""What watches a run: small objects that are told of progress and results."""

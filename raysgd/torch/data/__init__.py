"""Where a rank's batches come from. Worker."""

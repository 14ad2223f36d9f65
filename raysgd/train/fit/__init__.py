"""`DataParallelTrainer`, with its settings, its run directory and its result. Driver."""

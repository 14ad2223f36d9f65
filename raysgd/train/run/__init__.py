"""A run of a training function on elastic workers, and its doors: `Trainer`, `BackendExecutor`,
Tune's trials. Driver."""

"""raysgd: EPOCHS epochs, or, if that is not set, until the lost worker has been replaced. What it says of
itself is its last line: JSON."""

import json
import os
from dataclasses import asdict

import ray
from counting import CountingOperator, lost_and_doubled

from raysgd import TorchTrainer
from raysgd.config import ElasticConfig

WORKERS, SAMPLES, BATCH_SIZE = (int(os.environ[name]) for name in ("WORKERS", "SAMPLES", "BATCH_SIZE"))
SNAPSHOT = int(os.environ.get("SNAPSHOT_EVERY", "0")) or "epoch"
EPOCHS = int(os.environ.get("EPOCHS", "0"))
EPOCHS_AT_MOST = 12
COUNTS = os.environ.get("COUNTS", "1") == "1"

ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
config = {
    "samples": SAMPLES,
    "batch_size": BATCH_SIZE,
    "step_s": float(os.environ["STEP_S"]),
    "trace": os.environ["TRACE"],
    "counts": COUNTS,
}
counts = []
with TorchTrainer(
    training_operator_cls=CountingOperator,
    num_workers=WORKERS,
    use_ray=True,
    config=config,
    elastic=ElasticConfig(snapshot_every=SNAPSHOT),
) as trainer:
    for epoch in range(EPOCHS or EPOCHS_AT_MOST):
        trainer.train(max_retries=-1)
        if COUNTS:
            counts.append(lost_and_doubled(trainer, SAMPLES))
        if not EPOCHS and epoch > 0 and trainer.recoveries and trainer.world_size == WORKERS:
            break
    print(
        json.dumps(
            {
                "lost": sum(lost for lost, _ in counts),
                "doubled": sum(doubled for _, doubled in counts),
                "recoveries": [asdict(recovery) for recovery in trainer.recoveries],
            }
        ),
        flush=True,
    )

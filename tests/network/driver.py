"""Train three epochs with two workers, one on each host. `cut_link.py` runs this on the first host."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import ray
from counting import CountingOperator, lost_and_doubled

from raysgd import TorchTrainer
from raysgd.config import ElasticConfig

SAMPLES = 3200

ray.init(log_to_driver=False)
counts = []
with TorchTrainer(
    training_operator_cls=CountingOperator,
    num_workers=2,
    config={"samples": SAMPLES, "batch_size": 8, "step_s": 0.01, "trace": os.environ["TRACE"]},
    elastic=ElasticConfig(hang_timeout_s=float(os.environ["HANG_TIMEOUT_S"])),
) as trainer:
    hosts = trainer.apply_all_workers(ray.util.get_node_ip_address)
    for _ in range(3):
        trainer.train()
        counts.append(lost_and_doubled(trainer, SAMPLES))
    facts = {
        "hosts_before": hosts,
        "workers_after": trainer.world_size,
        "lost_and_doubled": counts,
        "recoveries": [asdict(recovery) for recovery in trainer.recoveries],
    }
print(json.dumps(facts), flush=True)

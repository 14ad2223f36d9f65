"""What the tests of several hosts run on the host of the script: `driver.py NAME`. Prints one line of JSON at its end."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import ray
import torch
from counting import CountingOperator, lost_and_doubled

from raysgd import TorchTrainer
from raysgd.cli import main
from raysgd.config import ElasticConfig
from raysgd.errors import RaysgdError

SAMPLES = 400
SETTINGS = {"samples": SAMPLES, "batch_size": 8, "step_s": 0.0}


class LargeOperator(CountingOperator):
    """Has 20 MB of state in addition, which takes no part in training."""

    def setup(self, config):
        super().setup(config)
        self.large = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1))

    def state_dict(self):
        return {**super().state_dict(), "large": self.large}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.large = state_dict["large"]


def trainer(operator: type = CountingOperator, **arguments: Any) -> TorchTrainer:
    elastic = ElasticConfig(hang_timeout_s=float(os.environ.get("HANG_TIMEOUT_S", "20")), snapshot_every=None)
    return TorchTrainer(
        **{"training_operator_cls": operator, "num_workers": 2, "config": SETTINGS, "elastic": elastic, **arguments}
    )


def facts(of: TorchTrainer) -> dict[str, Any]:
    return {
        "hosts": of.apply_all_workers(ray.util.get_node_ip_address),
        "lost_and_doubled": lost_and_doubled(of, SAMPLES),
        "recoveries": [asdict(recovery) for recovery in of.recoveries],
    }


def train() -> dict[str, Any]:
    with trainer() as of:
        of.train()
        return facts(of)


def save() -> dict[str, Any]:
    with trainer(LargeOperator) as of:
        of.train()
        began = time.monotonic()
        of.save("/tmp/large.pt")
        return {"save_s": time.monotonic() - began, "bytes": os.path.getsize("/tmp/large.pt"), **facts(of)}


def grow() -> dict[str, Any]:
    """Let a worker join another one. Its set-up may take 20 s at most."""
    with trainer(LargeOperator, timeout_s=20) as of:
        of.resize(1)
        of.train()
        of.resize(2)
        of.train()
        weights = of.apply_all_operators(lambda operator: float(operator.large.sum()))
        return {"large": weights, **facts(of)}


def cut() -> dict[str, Any]:
    """Train three epochs, in the second of which a host is cut off."""
    seconds, counts = [], []
    with trainer(config={**SETTINGS, "samples": 3200, "step_s": 0.01}) as of:
        for epoch in range(3):
            began = time.monotonic()
            of.train()
            seconds.append(time.monotonic() - began)
            counts.append(lost_and_doubled(of, 3200))
            print(f"trained epoch {epoch}", flush=True)
        return {**facts(of), "seconds": seconds, "lost_and_doubled": counts}


def wait() -> dict[str, Any]:
    """Train until this host is cut off from the others."""
    with trainer() as of:
        print("training", flush=True)
        while True:
            of.train()


if __name__ == "__main__":
    if sys.argv[1] == "doctor":
        main(["doctor", "--folder", "/tmp"])
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    ray.init(log_to_driver=False)
    try:
        result = {"train": train, "save": save, "grow": grow, "cut": cut, "wait": wait}[sys.argv[1]]()
    except RaysgdError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)

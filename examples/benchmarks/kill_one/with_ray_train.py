"""Ray Train v2, elastic from LEAST workers (1) to all, with a checkpoint reported once per epoch."""

import os
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

WORKERS = int(os.environ["WORKERS"])
LEAST = int(os.environ.get("LEAST", "1"))


def train_loop(config):
    from plain_loop import train

    def save(state):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": state["epoch"]}, checkpoint=checkpoint)

    state = None
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
    train(state, save)


ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as storage:
    TorchTrainer(
        train_loop,
        scaling_config=ray.train.ScalingConfig(num_workers=(LEAST, WORKERS) if LEAST < WORKERS else WORKERS),
        run_config=ray.train.RunConfig(storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=-1)),
    ).fit()

"""raysgd's function API: the same function as Ray Train v2's here, with a checkpoint reported once per epoch."""

import os
import tempfile

import ray

from raysgd import train
from raysgd.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, TorchTrainer

WORKERS = int(os.environ["WORKERS"])


def train_loop(config):
    from plain_loop import train as train_epochs

    def save(state):
        train.report({"epoch": state["epoch"]}, checkpoint=Checkpoint.from_dict(state))

    checkpoint = train.get_checkpoint()
    train_epochs(None if checkpoint is None else checkpoint.to_dict(), save)


ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as storage:
    TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=-1)),
    ).fit()

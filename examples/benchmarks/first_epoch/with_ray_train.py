"""Ray Train v2: one call of `fit` with one epoch in it."""

import tempfile

import ray
import ray.train
from ray.train.torch import TorchTrainer


def train_one_epoch(config):
    from handwritten import Loop
    from workloads import WORKLOADS, Setting

    context = ray.train.get_context()
    setting = Setting(WORKLOADS["tiny"].shortened(50), context.get_world_size())
    loop = Loop(setting, context.get_world_rank())
    ray.train.report({"loss": loop.epoch()})


ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as storage:
    TorchTrainer(
        train_one_epoch,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=storage),
    ).fit()
    print("first epoch done", flush=True)

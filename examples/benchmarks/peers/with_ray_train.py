"""Ray Train v2, as its guide has it: `prepare_model` and `prepare_data_loader`; but without a report after each epoch.

Its controller takes one report at each look at the workers, every two seconds as it comes, and a second report
waits for that. Epochs as short as these would be measured by that wait and nothing else.
"""

import os
import tempfile

import ray
import ray.train
import ray.train.torch
import torch
from torch.utils.data import DataLoader
from workloads import Setting


def train(config):
    from gate import Gate

    setting = config["setting"]
    torch.set_num_threads(1)
    workload, workers = setting.workload, setting.workers
    bare = workload.model()
    model = ray.train.torch.prepare_model(bare, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer, criterion = workload.optimizer(model), workload.criterion
    loader = DataLoader(workload.dataset(workers), batch_size=workload.batch_size, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    gate, epoch = Gate(config["gate"]), 0
    while gate.wait():
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for features, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
        float(loss.detach())
        epoch += 1


setting = Setting.of_environment()
ray.init(address=os.environ["CLUSTER"], log_to_driver=False)
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as storage:
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"setting": setting, "gate": os.environ["GATE"]},
        scaling_config=ray.train.ScalingConfig(num_workers=setting.workers),
        run_config=ray.train.RunConfig(storage_path=storage),
    ).fit()

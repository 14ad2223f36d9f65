"""Accelerate, as its guide has it: `prepare` what there is, and call `accelerator.backward`."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from gate import Gate
from torch.utils.data import DataLoader
from workloads import Setting

setting = Setting.of_environment()
torch.set_num_threads(1)
workload = setting.workload
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
bare = workload.model()
loader = DataLoader(workload.dataset(setting.workers), batch_size=workload.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(bare, workload.optimizer(bare), loader)
criterion = workload.criterion
gate = Gate()
while gate.wait():
    model.train()
    for features, target in loader:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = criterion(model(features), target)
        accelerator.backward(loss)
        optimizer.step()
    float(loss.detach())
os._exit(0)

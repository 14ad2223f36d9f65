"""Accelerate, on two processes of torchrun's."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from workloads import WORKLOADS

workload = WORKLOADS["tiny"].shortened(50)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
bare = workload.model()
loader = DataLoader(workload.dataset(2), batch_size=workload.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(bare, workload.optimizer(bare), loader)
for features, target in loader:
    optimizer.zero_grad()
    accelerator.backward(workload.criterion(model(features), target))
    optimizer.step()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print("first epoch done", flush=True)
accelerator.end_training()

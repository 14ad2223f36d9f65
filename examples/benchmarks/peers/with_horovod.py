"""The hand-written loop, with Horovod's optimizer in the place of DDP; a script that horovodrun starts on every rank."""

import os

import horovod.torch as hvd
import torch
from gate import Gate
from handwritten import Loop
from torch import nn
from workloads import Setting


class HorovodLoop(Loop):
    def shared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


hvd.init()
loop = HorovodLoop(Setting.of_environment(), hvd.rank())
gate = Gate()
while gate.wait():
    loop.epoch()
os._exit(0)  # as with torchrun: ranks that leave one after the other take nothing down

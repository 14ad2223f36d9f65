"""The hand-written loop, a script that torchrun starts on every rank."""

import os

import torch.distributed as dist
from gate import Gate
from handwritten import Loop
from workloads import Setting

setting = Setting.of_environment()
dist.init_process_group("gloo")
loop = Loop(setting, dist.get_rank())
gate = Gate()
while gate.wait():
    loop.epoch()
os._exit(0)  # a process group is not taken down by ranks that leave one after the other

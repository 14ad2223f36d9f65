"""Accelerate writes and reads the state of a model with these weights, in turn."""

import os

import torch
from accelerate import Accelerator
from gate import Gate
from weights import Weights

FOLDER = os.path.join(os.environ["FOLDER"], "accelerate")

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
weights = Weights(int(os.environ["MB"]))
model, optimizer = accelerator.prepare(weights, torch.optim.SGD(weights.parameters(), lr=0.1))
gate = Gate()
while gate.wait():
    accelerator.save_state(FOLDER)
    if gate.wait():
        accelerator.load_state(FOLDER)
os._exit(0)

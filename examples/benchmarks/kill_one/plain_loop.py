"""The loop of the peers' workers: the same model, data and rest; the state is saved once per epoch. With MB, the model and data of
sizes.py."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from counting import Indexed, small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from traces import StepTrace
from weights import Rows, Weights, optimizer_for

BEGINS = "begins"  # where, beside the notes of steps, each rank notes that it begins, and with which epoch
EPOCHS = int(os.environ.get("EPOCHS", "3"))
MB = int(os.environ.get("MB", "0"))
Save = Callable[[dict[str, Any]], None]


def train(state: dict[str, Any] | None, save: Save) -> None:
    """Trains EPOCHS epochs, from `state` if there is one; `save` is called on every rank after each epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    bare = Weights(MB) if MB else small_model()
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    optimizer = optimizer_for(bare, os.environ.get("OPTIMIZER", "SGD"))
    criterion = nn.CrossEntropyLoss()
    begin = 0
    if state is not None:
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    begins = Path(os.environ["TRACE"], BEGINS)
    begins.mkdir(exist_ok=True)
    StepTrace(str(begins)).step(rank, begin)
    samples = int(os.environ["SAMPLES"])
    data = Rows(samples) if MB else Indexed(samples)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=int(os.environ["BATCH_SIZE"]), sampler=sampler)
    trace, rest = StepTrace(os.environ["TRACE"]), float(os.environ["STEP_S"])
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for *_, features, target in loader:
            time.sleep(rest)
            loss = criterion(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.step(rank, epoch)
        save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})

"""The loop of the peers' workers: the same model, data and rest; the state is saved once per epoch."""

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

BEGINS = "begins"  # where, beside the notes of steps, each rank notes that it begins, and with which epoch
EPOCHS = int(os.environ.get("EPOCHS", "3"))
Save = Callable[[dict[str, Any]], None]


def train(state: dict[str, Any] | None, save: Save) -> None:
    """Trains EPOCHS epochs, from `state` if there is one; `save` is called on every rank after each epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    bare = small_model()
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    begin = 0
    if state is not None:
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    begins = Path(os.environ["TRACE"], BEGINS)
    begins.mkdir(exist_ok=True)
    StepTrace(str(begins)).step(rank, begin)
    data = Indexed(int(os.environ["SAMPLES"]))
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=int(os.environ["BATCH_SIZE"]), sampler=sampler)
    trace, rest = StepTrace(os.environ["TRACE"]), float(os.environ["STEP_S"])
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for _, features, target in loader:
            time.sleep(rest)
            loss = criterion(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.step(rank, epoch)
        save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})

"""torchrun --max-restarts: all ranks start again when one dies; the state is a file, one per epoch."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from plain_loop import train

FILE = Path(os.environ["TRACE"]) / "state.pt"


def save(state):
    if dist.get_rank() == 0:
        fresh = FILE.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(FILE)


def init_group():
    """torchrun's store outlives a restart. Without a prefix for each attempt, a new rank reads the addresses that the
    ranks before it have left there, and reaches none of them (torch 2.13)."""
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", agents)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


init_group()
train(torch.load(FILE) if FILE.exists() else None, save)
dist.destroy_process_group()

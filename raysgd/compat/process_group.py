"""RaySGD's functions to form a process group by hand: `setup_address` on rank 0, `setup_process_group` on all. Worker."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from raysgd.compat.utils import find_free_port

__all__ = ["setup_address", "setup_process_group"]


def setup_address() -> str:
    """Return an address on this machine for `setup_process_group`, with a port that was free a moment ago."""
    import ray

    return f"tcp://{ray.util.get_node_ip_address()}:{find_free_port()}"


def setup_process_group(url: str, world_rank: int, world_size: int, timeout: float, backend: str = "gloo") -> None:
    """Join a process group of torch. `timeout` is the limit in seconds of its collective calls."""
    if backend == "nccl":
        os.environ.setdefault("NCCL_BLOCKING_WAIT", "1")
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=url, rank=world_rank, world_size=world_size, timeout=limit)

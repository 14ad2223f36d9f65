"""Where the ranks of all phases are: one on each of several GPUs, three on one GPU, or, without one, on the emulation."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import torch

# NCCL refuses two ranks on one GPU of one machine. With names of their own, they are on two machines for it, and talk
# through sockets, which is the case in which NCCL notices failures itself.
ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
}
SHARE = 0.1  # of one GPU, for each worker: there can be three, and replacements that wait


@cache
def gpus() -> int:
    """Return how many GPUs there are. Not at import: a process that has asked cannot fork others that use CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def rank_count() -> int:
    return gpus() if gpus() > 1 else 3


def device(rank: int = 0) -> torch.device:
    return torch.device("cuda", rank % gpus()) if gpus() else torch.device("cpu")


def share_a_gpu() -> None:
    """Let this process be a rank on a GPU that other ranks use."""
    os.environ.update(ON_ONE_GPU, NCCL_HOSTID=str(os.getpid()))


def emulate_nccl() -> None:
    """Let NCCL be the emulation in this process."""
    importlib.import_module("tests.emulated.nccl").install(network=True)


def prepare_rank() -> None:
    """Set what NCCL reads in a process that becomes a rank, and sees all GPUs."""
    if gpus() < 2:
        (share_a_gpu if gpus() else emulate_nccl)()


def group_arguments(workers: int | None = None, backend: str = "nccl") -> dict[str, Any]:
    """Return the arguments of a trainer with several workers on this machine. Each of these sees one GPU only."""
    os.environ["RAYSGD_NCCL_ANYWHERE"] = "1"  # also for ranks that share a GPU, and for those of the emulation
    resources = {"CPU": 0.01, "GPU": 1.0 if gpus() > 1 else SHARE}
    return {
        "num_workers": workers or rank_count(),
        "use_gpu": gpus() > 0,
        "backend": backend,
        "resources_per_worker": {name: amount for name, amount in resources.items() if gpus() or name == "CPU"},
        "initialization_hook": {0: emulate_nccl, 1: share_a_gpu}.get(gpus()),
    }


def wait() -> None:
    """Wait for the device."""
    if gpus():
        torch.cuda.synchronize()

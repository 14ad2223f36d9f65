"""Connects the ranks of a torch function, and sets the environment for scripts. Both."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.control import Control
from raysgd.core.ranks import RankInfo
from raysgd.torch.foreign import with_module_versions
from raysgd.torch.group import sharing
from raysgd.torch.group.devices import OffersGpus, see_gpus, shared_gpus
from raysgd.torch.group.process_group import TorchBackend


class TorchFunctionBackend(OffersGpus, TorchBackend):
    """Connects the ranks in a torch process group, and with `env` sets MASTER_ADDR, RANK and so on.
    Each sees the GPUs of its node, because scripts use `cuda:{local_rank}`."""

    def __init__(self, name: str, *, env: bool = True, use_gpu: bool = False, **limits: Any) -> None:
        super().__init__(name, **limits)
        self._env, self.needs_offers = env, use_gpu

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        settings = super().plan(rank_infos)
        if not self.needs_offers:
            return settings
        return [{**each, "gpus": gpus} for each, gpus in zip(settings, shared_gpus(rank_infos, offers), strict=True)]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        if self._env and not rank_info.solo:
            os.environ.update(environment(rank_info, settings))
        if "gpus" in settings and not torch.cuda.is_initialized():
            torch.cuda.set_device(see_gpus(settings["gpus"], self.offer()["gpus"]))
        super().join(rank_info, settings)


def share_bytes(make: Callable[[], bytes], giver: int, control: Control) -> bytearray:
    """Broadcast the bytes that the rank `giver` makes."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return sharing.share_bytes(make() if dist.get_rank() == giver else b"", giver, device=device, control=control)


def environment(rank_info: RankInfo, settings: dict[str, Any]) -> dict[str, str]:
    """The variables that torchrun would set."""
    return {
        "MASTER_ADDR": str(settings["host"]),
        "MASTER_PORT": str(settings["port"]),
        "RANK": str(rank_info.world_rank),
        "WORLD_SIZE": str(rank_info.world_size),
        "LOCAL_RANK": str(rank_info.local_rank),
        "LOCAL_WORLD_SIZE": str(rank_info.local_world_size),
        "NODE_RANK": str(rank_info.node_rank),
    }


def to_cpu(value: Any) -> Any:
    """Move tensors to the CPU, because the driver may have no GPU, and take models out of
    DistributedDataParallel, which cannot be loaded without a process group."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if isinstance(value, torch.nn.Module):
        on_gpu = any(tensor.is_cuda for tensor in (*value.parameters(), *value.buffers()))
        return copy.deepcopy(value).cpu() if on_gpu else value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.is_cuda else value
    if isinstance(value, dict):
        moved = {key: to_cpu(each) for key, each in value.items()}
        return Counter(moved) if type(value) is Counter else with_module_versions(moved, value)
    if type(value) in (list, tuple):
        return type(value)(to_cpu(each) for each in value)
    return value

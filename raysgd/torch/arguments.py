"""Checks of a TorchTrainer's arguments, and what older spellings of them mean. Driver."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError

__all__ = ["REMOVED", "per_worker_config", "resolve_parallel", "resolve_precision"]

IN_SETUP = "make it in the setup of a TrainingOperator subclass, or use TrainingOperator.from_creators(...)"
REMOVED = {
    "num_replicas": "use num_workers",
    "batch_size": "put it in config; config['*batch_size'] (raysgd.utils.BATCH_SIZE) is a global one",
    "model_creator": IN_SETUP,
    "data_creator": IN_SETUP,
    "optimizer_creator": IN_SETUP,
    "scheduler_creator": IN_SETUP,
    "loss_creator": IN_SETUP,
    "data_loader_args": "pass them to the DataLoader you make in setup",
    "apex_args": "pass them to self.register(apex_args=...) in setup",
}


def resolve_parallel(parallel: Any, wrap_ddp: Any) -> Any:
    """Return `parallel`, which v1 called `wrap_ddp`."""
    if wrap_ddp:
        return "ddp" if parallel == "auto" else parallel
    if parallel not in ("auto", None):
        raise ConfigError(f"wrap_ddp=False means parallel=None, but parallel={parallel!r} was given: pass one")
    return None


def resolve_precision(precision: Any, use_fp16: Any) -> str:
    """Return `precision`, which v1 called `use_fp16`."""
    if use_fp16 not in (False, True, "apex"):
        raise ConfigError(f"use_fp16 must be False, True or 'apex', got {use_fp16!r}")
    old = {False: None, True: "fp16", "apex": "apex"}[use_fp16]
    if precision is None:
        return old or "fp32"
    if precision not in ("fp32", "fp16", "bf16", "apex"):
        raise ConfigError(f"precision must be 'fp32', 'fp16', 'bf16' or 'apex', got {precision!r}")
    if old is not None and old != precision:
        raise ConfigError(
            f"use_fp16={use_fp16!r} means precision={old!r}, but precision={precision!r} was given: pass one"
        )
    return str(precision)


def per_worker_config(config: Any, num_workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config as the trainer shows it, and as each worker gets it. The batch size is divided by the number of
    workers; a remainder is dropped with a warning."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    shown = dict(config or {})
    if BATCH_SIZE not in shown:
        return shown, dict(shown)
    total = shown[BATCH_SIZE]
    if not isinstance(total, int) or isinstance(total, bool) or total < num_workers:
        raise ConfigError(
            f"config[{BATCH_SIZE!r}] is the batch of all workers together: a whole number of at least num_workers "
            f"({num_workers}), got {total!r}"
        )
    each = total // num_workers
    if each * num_workers != total:
        warnings.warn(
            f"the global batch of {total} does not divide by {num_workers} workers: using {each} each, "
            f"{each * num_workers} together",
            stacklevel=3,
        )
    shown[BATCH_SIZE] = each * num_workers
    return shown, {**shown, BATCH_SIZE: each}

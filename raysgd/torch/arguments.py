"""What a trainer's arguments may be: checked once, in words that say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from raysgd.constants import BATCH_SIZE, VALID_SCHEDULER_STEP
from raysgd.errors import ConfigError

__all__ = [
    "REMOVED",
    "check_backend",
    "check_num_workers",
    "check_operator",
    "check_scheduler_step",
    "per_worker_config",
    "refuse_removed",
    "resolve_precision",
]

IN_SETUP = "make it in the setup of a TrainingOperator subclass, or use TrainingOperator.from_creators(...)"
REMOVED = {
    "num_replicas": "use num_workers",
    "batch_size": "put it into config; config['*batch_size'] (raysgd.utils.BATCH_SIZE) is a global one",
    "model_creator": IN_SETUP,
    "data_creator": IN_SETUP,
    "optimizer_creator": IN_SETUP,
    "scheduler_creator": IN_SETUP,
    "loss_creator": IN_SETUP,
    "data_loader_args": "pass them to the DataLoader you make in setup",
    "apex_args": "pass them to self.register(apex_args=...) in setup",
}


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Arguments that v1 took in its early days, and ones that nobody ever took."""
    if given.get("serialize_data_creation"):
        warnings.warn(
            "serialize_data_creation has no effect here; pass it to TrainingOperator.from_creators(...)",
            DeprecationWarning,
            stacklevel=4,
        )
    for name, value in given.items():
        if name in REMOVED and value is not None:
            raise DeprecationWarning(f"TorchTrainer takes no {name} any more: {REMOVED[name]}. See docs/migrating.md")
        if name not in REMOVED and name != "serialize_data_creation":
            raise TypeError(f"TorchTrainer takes no argument {name!r}")


def check_operator(operator_cls: Any, base: type) -> None:
    if not isinstance(operator_cls, type) or not issubclass(operator_cls, base):
        hint = " Pass the class itself, not an instance." if isinstance(operator_cls, base) else ""
        raise ConfigError(
            f"training_operator_cls must be a subclass of raysgd's {base.__name__}, got {operator_cls!r}.{hint}"
        )


def check_num_workers(num_workers: Any) -> int:
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(f"num_workers must be a whole number of at least 1, got {num_workers!r}")
    return num_workers


def check_scheduler_step(freq: Any) -> None:
    if freq is not None and freq not in VALID_SCHEDULER_STEP:
        raise ConfigError(f"scheduler_step_freq must be one of {sorted(VALID_SCHEDULER_STEP)} or None, got {freq!r}")


def check_backend(backend: Any, use_gpu: bool) -> str:
    if backend == "auto":
        return "nccl" if use_gpu else "gloo"
    if backend not in ("gloo", "nccl", "horovod"):
        raise ConfigError(f"backend must be 'auto', 'gloo', 'nccl' or 'horovod', got {backend!r}")
    return str(backend)


def resolve_precision(precision: Any, use_fp16: Any) -> str:
    """v1's `use_fp16` and our `precision` are two spellings of one thing."""
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
    """(what the trainer shows, what each worker gets). A global batch size is split, rounded down with a warning."""
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
            stacklevel=4,
        )
    shown[BATCH_SIZE] = each * num_workers
    return shown, {**shown, BATCH_SIZE: each}

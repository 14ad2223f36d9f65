"""What a TFTrainer's arguments may be: checked once, in words that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.config import WorkerResources, check_trainer
from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError
from raysgd.tf.compiled import EVALUATE, FIT, checked_fit_config, operator_from_creators
from raysgd.tf.operator import TrainingOperator

__all__ = ["check_common", "checked_config", "needs_ray", "operator_class", "workers"]


def operator_class(model_creator: Any, data_creator: Any, training_operator_cls: Any) -> type[TrainingOperator]:
    """The class that was given, or one made of v1's two creators."""
    if training_operator_cls is None:
        if model_creator is None or data_creator is None:
            raise ConfigError("pass training_operator_cls, or model_creator and data_creator")
        return operator_from_creators(model_creator, data_creator)
    if model_creator is not None or data_creator is not None:
        raise ConfigError("pass either training_operator_cls or the creators, not both")
    if not isinstance(training_operator_cls, type) or not issubclass(training_operator_cls, TrainingOperator):
        raise ConfigError(
            f"training_operator_cls must be a subclass of raysgd.tf.TrainingOperator, got {training_operator_cls!r}"
        )
    return training_operator_cls


def workers(num_replicas: Any, num_workers: Any) -> int:
    """v1's name and ours are two spellings of one thing."""
    for name, number in {"num_replicas": num_replicas, "num_workers": num_workers}.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, got {number!r}")
    if None not in (num_replicas, num_workers) and num_replicas != num_workers:
        raise ConfigError(f"num_replicas={num_replicas} and num_workers={num_workers} are the same thing: pass one")
    number = num_workers if num_workers is not None else num_replicas
    return 1 if number is None else int(number)


def needs_ray(use_ray: Any, num_workers: int, resources: WorkerResources) -> bool:
    """One worker runs in this process, unless Ray is asked for or must find what the worker needs elsewhere."""
    if use_ray is False and (num_workers > 1 or resources.custom):
        raise ConfigError("use_ray=False is possible with num_workers=1 and without custom resources only")
    return bool(use_ray) or num_workers > 1 or bool(resources.custom)


def checked_config(config: Any, num_workers: int) -> dict[str, Any]:
    """A copy. The batch size in it is that of all workers together, as a data set's is: nothing is divided."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    shown = dict(config or {})
    total = shown.get(BATCH_SIZE, num_workers)
    if not isinstance(total, int) or isinstance(total, bool) or total < num_workers:
        raise ConfigError(
            f"config[{BATCH_SIZE!r}] is the batch of all workers together: a whole number of at least num_workers "
            f"({num_workers}), got {total!r}"
        )
    checked_fit_config(shown, FIT)
    checked_fit_config(shown, EVALUATE)
    return shown


def check_common(hook: Any, timeout_s: Any, elastic: Any, use_gpu: Any) -> None:
    check_trainer(hook, timeout_s, elastic)
    if not isinstance(use_gpu, bool):
        raise ConfigError(f"use_gpu must be True or False, got {use_gpu!r}")

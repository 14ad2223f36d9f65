"""Checks of a TFTrainer's arguments. Driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError
from raysgd.tf.compiled import EVALUATE, FIT, checked_fit_config, operator_from_creators
from raysgd.training.arguments import check_num_workers

__all__ = ["checked_config", "operator_class", "resolve_num_workers"]


def operator_class(model_creator: Any, data_creator: Any, training_operator_cls: Any) -> Any:
    """Return the operator class that was passed, or one made of v1's two creators."""
    if training_operator_cls is None:
        if model_creator is None or data_creator is None:
            raise ConfigError("pass training_operator_cls, or model_creator and data_creator")
        return operator_from_creators(model_creator, data_creator)
    if model_creator is not None or data_creator is not None:
        raise ConfigError("pass either training_operator_cls or the creators, not both")
    return training_operator_cls


def resolve_num_workers(num_replicas: int | None, num_workers: int | None) -> int:
    """Return `num_workers`, which v1 called `num_replicas`; 1 if neither was passed."""
    for name, number in {"num_replicas": num_replicas, "num_workers": num_workers}.items():
        if number is not None:
            check_num_workers(number, name)
    if None not in (num_replicas, num_workers) and num_replicas != num_workers:
        raise ConfigError(f"num_replicas={num_replicas} and num_workers={num_workers} are the same thing: pass one")
    return num_workers or num_replicas or 1


def checked_config(config: Any, num_workers: int) -> dict[str, Any]:
    """Return a copy of the config. Its batch size is that of all workers together, as a data set's is, so it is not
    divided."""
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

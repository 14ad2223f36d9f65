"""What AIR's training functions call as `session.report({...})`. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.train import functions
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.functions import get_context


def report(metrics: Mapping[str, Any] | None = None, *, checkpoint: Checkpoint | None = None, **values: Any) -> None:
    """Report metrics, and a checkpoint if there is one: `train.report`."""
    functions.report(metrics, checkpoint, **values)


def get_world_rank() -> int:
    """Return this worker's rank among all workers."""
    return get_context().get_world_rank()


def get_world_size() -> int:
    """Return the number of workers."""
    return get_context().get_world_size()


def get_local_rank() -> int:
    """Return this worker's rank among the workers of its node."""
    return get_context().get_local_rank()


def get_local_world_size() -> int:
    """Return the number of workers on this worker's node."""
    return get_context().get_local_world_size()


def get_node_rank() -> int:
    """Return the rank of this worker's node."""
    return get_context().get_node_rank()


def get_metadata() -> dict[str, Any]:
    """Return the trainer's argument `metadata`."""
    return get_context().get_metadata()


def get_experiment_name() -> str | None:
    return get_context().get_experiment_name()


def get_trial_name() -> str | None:
    return get_context().get_trial_name()


def get_trial_id() -> str | None:
    return get_context().get_trial_id()


def get_trial_dir() -> str | None:
    """Return the run's directory on the driver."""
    return get_context().get_trial_dir()


def get_trial_resources() -> Any:
    return get_context().get_trial_resources()

"""What AIR's training functions call as `session.report({...})`. Worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from raysgd.train import session_functions
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.session_functions import TrainContext, get_context

Result = TypeVar("Result")


def report(metrics: Mapping[str, Any] | None = None, *, checkpoint: Checkpoint | None = None, **values: Any) -> None:
    """Report metrics, and a checkpoint if there is one: `train.report`."""
    session_functions.report(metrics, checkpoint, **values)


def _of_context(method: Callable[[TrainContext], Result]) -> Callable[[], Result]:
    """Make a function that calls this method of the context of the training function."""

    def call() -> Result:
        return method(get_context())

    call.__name__ = call.__qualname__ = method.__name__
    return call


get_world_rank = _of_context(TrainContext.get_world_rank)
get_world_size = _of_context(TrainContext.get_world_size)
get_local_rank = _of_context(TrainContext.get_local_rank)
get_local_world_size = _of_context(TrainContext.get_local_world_size)
get_node_rank = _of_context(TrainContext.get_node_rank)
get_metadata = _of_context(TrainContext.get_metadata)
get_experiment_name = _of_context(TrainContext.get_experiment_name)
get_trial_name = _of_context(TrainContext.get_trial_name)
get_trial_id = _of_context(TrainContext.get_trial_id)
get_trial_dir = _of_context(TrainContext.get_trial_dir)
get_trial_resources = _of_context(TrainContext.get_trial_resources)

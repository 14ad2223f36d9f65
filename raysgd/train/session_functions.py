"""What a training function calls, such as `train.report`. Worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.errors import ConfigError, shown
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.sessions import Session, current

__all__ = [
    "TrainContext",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "once",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]


def report(metrics: Any = None, checkpoint: Any = None, **values: Any) -> None:
    """Report metrics: `report(loss=0.1)`, or `report({"loss": 0.1}, checkpoint=Checkpoint...)`,
    where `metrics` is a dictionary.

    Every rank must call it. It returns when all ranks have called it, and the checkpoint is stored.
    """
    if isinstance(checkpoint, (Mapping, str, os.PathLike)):
        raise TypeError(
            f"checkpoint must be a Checkpoint, got {shown(checkpoint)}: pass Checkpoint.from_dict({{...}}) or from_directory(path)"
        )
    session = current("report")
    row: dict[str, Any] = dict(values)
    if isinstance(metrics, Mapping):
        row = {**metrics, **row}
    elif metrics is not None:
        row["metrics"] = metrics
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        row["checkpoint"], checkpoint = checkpoint, None
    session.report(row, checkpoint)


def once(make: Callable[[], Any], name: str | None = None) -> Any:
    """Call `make()`, only once in this process, and return what it returns: when the function runs
    again after a worker failure, the object is there.

        tokens = train.once(load_tokens)
        model = copy.deepcopy(train.once(lambda: AutoModel.from_pretrained(path), "model"))

    The object stays as the function leaves it, so train a copy. `name` is the name of `make` by
    default, and must be another one for each call.
    """
    if not callable(make):
        raise ConfigError(f"train.once takes a function without arguments, got {make!r}")
    name = name or getattr(getattr(make, "func", make), "__qualname__", None)  # a partial has a `func`
    if name is None:
        raise ConfigError(f"train.once needs a name= for {make!r}, which has none")
    return current("once").once(name, make)


def save_checkpoint(**values: Any) -> None:
    """Save a checkpoint of these values. Every rank must call it; raysgd keeps rank 0's. It returns
    when all ranks have called it, and the checkpoint is stored."""
    current("save_checkpoint").save_checkpoint(values)


def load_checkpoint() -> dict[str, Any] | None:
    """Load as a dict the run's newest checkpoint, or what it started from, or None. A rank gets
    only its own of this attempt, as from `get_checkpoint`."""
    checkpoint = current("load_checkpoint").checkpoint()
    return None if checkpoint is None else checkpoint.to_dict()


def get_checkpoint() -> Checkpoint | None:
    """Get the newest checkpoint of this run, or the one that the run started from, or None.

    All ranks get the same when the function begins. Later, as in Ray Train, each gets the newest
    that it has itself reported in this attempt. One that reports `checkpoint=None` keeps the one
    from the beginning: to load what rank 0 has reported there, report it on every rank.
    """
    return current("get_checkpoint").checkpoint()


def world_rank() -> int:
    """This worker's rank among all workers."""
    return current("world_rank").rank_info.world_rank


def local_rank() -> int:
    """This worker's rank among the workers of its node."""
    return current("local_rank").rank_info.local_rank


def world_size() -> int:
    """The number of workers. It may be different when the function runs again."""
    return current("world_size").rank_info.world_size


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Get this worker's part of a dataset, by `dataset_name` if there are several, or None."""
    return current("get_dataset_shard").shard(dataset_name)


def get_context() -> TrainContext:
    """Get the context of this function: ranks, sizes, metadata, and the trial under Tune."""
    return TrainContext(current("get_context"))


class TrainContext:
    """Reads one session, and has no state."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_world_size(self) -> int:
        """The number of workers."""
        return self._session.rank_info.world_size

    def get_world_rank(self) -> int:
        """This worker's rank among all workers."""
        return self._session.rank_info.world_rank

    def get_local_rank(self) -> int:
        """This worker's rank among those of its node."""
        return self._session.rank_info.local_rank

    def get_local_world_size(self) -> int:
        """The number of workers on this node."""
        return self._session.rank_info.local_world_size

    def get_node_rank(self) -> int:
        """The number of this worker's node."""
        return self._session.rank_info.node_rank

    def get_metadata(self) -> dict[str, Any]:
        """The trainer's argument `metadata`."""
        return dict(self._session.attempt.metadata)

    def get_experiment_name(self) -> str | None:
        """The name of the experiment."""
        return self._trial("experiment_name")

    def get_trial_name(self) -> str | None:
        """The name of the Tune trial, or of the run."""
        return self._trial("trial_name")

    def get_trial_id(self) -> str | None:
        """The id of the Tune trial."""
        return self._trial("trial_id")

    def get_trial_dir(self) -> str | None:
        """The run's directory on the driver."""
        return self._trial("trial_dir")

    def get_trial_resources(self) -> Any:
        """The resources of the Tune trial."""
        return self._session.attempt.trial.get("trial_resources")

    def _trial(self, name: str) -> str | None:
        value = self._session.attempt.trial.get(name)
        return None if value is None else str(value)

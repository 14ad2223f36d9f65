"""The functions that a training function calls, such as `train.report`. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.train.checkpoint import Checkpoint
from raysgd.train.run_session import Session, current

__all__ = [
    "TrainContext",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]


def report(metrics: Any = None, checkpoint: Any = None, **values: Any) -> None:
    """Report metrics: `report(loss=0.1)`, or `report({"loss": 0.1}, checkpoint=Checkpoint...)`,
    where `metrics` is a dictionary.

    Every rank must call it equally often. When it returns, the driver has received the report, so
    that it is not lost if the worker fails.
    """
    session = current("report")
    row: dict[str, Any] = dict(values)
    if isinstance(metrics, Mapping):
        row = {**metrics, **row}
    elif metrics is not None:
        row["metrics"] = metrics
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        row["checkpoint"], checkpoint = checkpoint, None
    session.report(row, checkpoint)


def save_checkpoint(**values: Any) -> None:
    """Save a checkpoint of these values. Every rank must call it; raysgd keeps rank 0's."""
    current("save_checkpoint").save_checkpoint(values)


def load_checkpoint() -> dict[str, Any] | None:
    """Return as a dict the run's newest checkpoint, or what it started from, or None."""
    found = current("load_checkpoint").checkpoint()
    return None if found is None else found.to_dict()


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint of this run, or the one that the run started from, or None."""
    return current("get_checkpoint").checkpoint()


def world_rank() -> int:
    """Return this worker's rank among all workers."""
    return current("world_rank").rank_info.world_rank


def local_rank() -> int:
    """Return this worker's rank among the workers of its node."""
    return current("local_rank").rank_info.local_rank


def world_size() -> int:
    """Return the number of workers. It may be different when the function runs again."""
    return current("world_size").rank_info.world_size


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's part of a dataset, by `dataset_name` if there are several, or None."""
    return current("get_dataset_shard").shard(dataset_name)


def get_context() -> TrainContext:
    """Return the context of this function: ranks, sizes, metadata, and the trial under Tune."""
    return TrainContext(current("get_context"))


class TrainContext:
    """Reads one session, and has no state."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self._session.rank_info.world_size

    def get_world_rank(self) -> int:
        """Return this worker's rank among all workers."""
        return self._session.rank_info.world_rank

    def get_local_rank(self) -> int:
        """Return this worker's rank among those of its node."""
        return self._session.rank_info.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self._session.rank_info.local_world_size

    def get_node_rank(self) -> int:
        """Return the number of this worker's node."""
        return self._session.rank_info.node_rank

    def get_metadata(self) -> dict[str, Any]:
        """Return the trainer's argument `metadata`."""
        return dict(self._session.attempt.metadata)

    def get_experiment_name(self) -> str | None:
        """Return the name of the experiment."""
        return self._trial("experiment_name")

    def get_trial_name(self) -> str | None:
        """Return the name of the Tune trial, or of the run."""
        return self._trial("trial_name")

    def get_trial_id(self) -> str | None:
        """Return the id of the Tune trial."""
        return self._trial("trial_id")

    def get_trial_dir(self) -> str | None:
        """Return the run's directory on the driver."""
        return self._trial("trial_dir")

    def get_trial_resources(self) -> Any:
        """Return the resources of the Tune trial."""
        return self._session.attempt.trial.get("trial_resources")

    def _trial(self, name: str) -> str | None:
        found = self._session.attempt.trial.get(name)
        return None if found is None else str(found)

"""What tests look at, or change, inside trainers and operators. When these are rebuilt, it is this module that follows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def parts_of(operator: Any) -> Any:
    """Return what an operator has registered: `optimizers`, `schedulers`, `averages`, and loaders by the names of `register_data`."""
    return operator._parts


def models_of(operator: Any) -> list[Any]:
    """Return its models, without the wrappers of several workers."""
    models: list[Any] = operator._parts.models
    return models


def options_of(operator: Any) -> Any:
    """Return the `TrainingOptions` with which it trains."""
    return operator._settings.options


def finish_saves(trainer: Any) -> None:
    """Wait until the newest automatic checkpoint is in its folder."""
    trainer._folder.wait()


def newest_snapshot(trainer: Any) -> Any:
    """Return what new workers would start from if all failed."""
    return trainer._engine._table.snapshots.latest()


def ready_replacements(trainer: Any) -> int:
    """Return how many workers are set up and can join, spares included."""
    ready: int = trainer._engine._membership._replacements.ready
    return ready


def loads_of(trainer: Any) -> set[int]:
    """Return how many loads the workers have counted: one number, if they agree."""
    table = trainer._engine._table
    return {table[worker].progress.loads for worker in table.members()}


def drain_node(trainer: Any, patch: Any, until: Callable[[], bool], limit_s: float) -> None:
    """Let Ray say that it drains the node of a worker, until a condition holds."""
    table = trainer._engine._table
    node = table[table.members()[0]].node
    patch.setattr(table.group, "draining", lambda: {} if until() else {node: limit_s})


def assume_notice(patch: Any, seconds: float) -> None:
    """Let a machine that has announced its end without saying when be there for so long."""
    from raysgd.core import policy

    patch.setattr(policy, "ASSUMED_NOTICE_S", seconds)


def differences(operators: list[Any]) -> list[Any]:
    """Compare operators of TensorFlow, as if they were those of the ranks."""
    from raysgd.core.comparison import compare
    from raysgd.tf.parts import summary_of

    return compare({rank: summary_of(parts_of(each), 0).as_text() for rank, each in enumerate(operators)})


def want_workers(trainer: Any, number: int) -> None:
    """Let a started Trainer of functions grow to this number when it next can."""
    trainer._executor._active()._membership.target = number


def run_with_shards(trainer: Any, function: Any, data: dict[str, Any], config: Any, folder: Path) -> list[Any]:
    """Run a function like a trainer with a dataset_config, which `Trainer.run(dataset=...)` does not have."""
    from raysgd.ray_data.splits import make_splits
    from raysgd.train.run import RunOptions

    executor = trainer._executor
    executor.start_training(function, folder, options=RunOptions(shards=make_splits(data, config)))
    results: list[Any] = executor.finish_training()
    return results


def pretend_workers(trainer: Any, number: int) -> None:
    """Let the loops of a trainer in this process count as those of this number of workers."""
    trainer._loops._workers = number


def pace_of(history: Any) -> list[tuple[float, float, int]]:
    """Return the points of the line that reports draw: (time, seconds in calls, batches)."""
    pace: list[tuple[float, float, int]] = history._timeline.pace
    return pace


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return what the record of a run stores of a DataParallelTrainer."""
    settings: dict[str, Any] = trainer._packed()
    return settings


def record_run(folder: Path, settings: dict[str, Any]) -> None:
    """Store these settings in a folder, as a run that begins does."""
    from raysgd.train.fit.records import RunNames, RunRecord

    RunRecord(folder, folder, RunNames("DataParallelTrainer", "run"), {}, None).begin(settings)


def save_no_random_states(trainer: Any) -> None:
    """Leave the random states out of what this trainer saves."""
    trainer._saves.random_states = lambda: []

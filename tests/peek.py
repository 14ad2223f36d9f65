"""What tests look at, or change, inside trainers and operators. When these are rebuilt, it is this module that follows."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch as patched


def parts_of(operator: Any) -> Any:
    """Return what an operator has registered: `optimizers`, `schedulers`, and loaders by the names of `register_data`."""
    return operator._internals.registered


def models_of(operator: Any) -> list[Any]:
    """Return its models, without the wrappers of several workers."""
    models: list[Any] = operator._internals.registered.models
    return models


def options_of(operator: Any) -> Any:
    """Return the `TrainingOptions` with which it trains."""
    return operator._internals.settings.options


def rows_now(operator: Any) -> list[int]:
    """Return the indices of the samples in the running batch."""
    rows: list[int] = operator._internals.feed.step.current.indices
    return rows


def weighs_arriving_gradients(operator: Any) -> bool:
    """Return whether hooks on the registered parameters weigh gradients, in backward passes that user code makes itself."""
    return bool(operator._internals.weigh._hooks)


def finish_saves(trainer: Any) -> None:
    """Wait until the newest automatic checkpoint is in its folder."""
    trainer._folder.wait()


def leave_no_checkpoint_out(trainer: Any) -> None:
    """Let each automatic checkpoint wait until the one before is in the folder."""
    folder = trainer._folder

    def is_saving() -> bool:
        folder.wait_until_ended()
        return False

    folder.is_saving = is_saving


def saves_within_again(trainer: Any) -> bool:
    """Return whether the newest call of train, if it is made again now, makes automatic checkpoints between its batches."""
    return "asks" in trainer._loops.begin_part(trainer._loops.call)


def forget_checkpoint(trainer: Any) -> None:
    """Let the newest automatic checkpoint count as one that was never completed."""
    trainer._folder.forget(trainer._folder.latest)


def delay_saves(trainer: Any, until: Callable[[], bool]) -> None:
    """Let no automatic checkpoint be complete until a condition holds."""
    folder = trainer._folder
    original = folder._file

    def file_of(place: Any, suffix: str | None = None) -> Any:
        while suffix == ".json" and not until():
            time.sleep(0.02)
        return original(place, suffix)

    folder._file = file_of


def newest_snapshot(trainer: Any) -> Any:
    """Return what new workers would start from if all failed."""
    return trainer._engine._table.snapshots.latest()


def ready_replacements(trainer: Any) -> int:
    """Return how many workers are set up and can join, spares included."""
    ready: int = trainer._engine._replacements.ready
    return ready


def loads_of(trainer: Any) -> set[int]:
    """Return how many loads the workers have counted: one number, if they agree."""
    table = trainer._engine._table
    return {table[worker].progress.loads for worker in table.members()}


def greet(trainer: Any) -> None:
    """Let the workers know that this process runs, unless it has ended their connections."""
    trainer._engine.group.control.greet()


def drain_node(trainer: Any, patch: Any, until: Callable[[], bool], limit_s: float) -> None:
    """Let Ray say that it drains the node of a worker, until a condition holds."""
    table = trainer._engine._table
    node = table[table.members()[0]].node
    patch.setattr(table.group, "draining", lambda: {} if until() else {node: limit_s})


def want_workers(trainer: Any, number: int) -> None:
    """Let a started Trainer of functions grow to this number when it next can."""
    trainer._executor._require_workers().engine._membership.target = number


def run_with_shards(trainer: Any, function: Any, data: dict[str, Any], config: Any, folder: Path) -> list[Any]:
    """Run a function like a trainer with a dataset_config, which `Trainer.run(dataset=...)` does not have."""
    from raysgd.train.run.job import FunctionJob
    from raysgd.train.run.splits import make_splits

    executor = trainer._executor
    job = FunctionJob(function=function, shards=make_splits(data, config))
    executor.begin(job, job.make_manager(folder / "checkpoints"))
    results: list[Any] = executor.finish_training()
    return results


def pace_of(history: Any) -> list[tuple[float, float, int]]:
    """Return the points of the line that reports draw: (time, seconds in calls, batches)."""
    pace: list[tuple[float, float, int]] = history._timeline.pace
    return pace


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return what the record of a run stores of a DataParallelTrainer."""
    settings: dict[str, Any] = trainer._pack_settings()
    return settings


def record_run(folder: Path, settings: dict[str, Any]) -> None:
    """Store these settings in a folder, as a run that begins does."""
    from raysgd.train.fit.records import RunRecord

    RunRecord(folder, folder, "DataParallelTrainer", {}, None).begin(settings)


def set_limits(
    patch: Any,
    *,
    release_s: float | None = None,
    notice_s: float | None = None,
    ctrl_c_s: float | None = None,
    freed_times: int = 1,
) -> None:
    """Set how long a shutdown waits for a call in another thread, how long before its end a machine is assumed to be announced, how long
    Ctrl-C waits for the workers, and how many times longer the end of a worker and its CPUs are waited for."""
    from raysgd.core.decisions import policy
    from raysgd.engine import call, engine
    from raysgd.workers.cluster import nodes

    for module, name, seconds in (
        (engine, "RELEASE_S", release_s),
        (policy, "ASSUMED_NOTICE_S", notice_s),
        (call, "CTRL_C_S", ctrl_c_s),
        (nodes, "ENDED_S", freed_times * nodes.ENDED_S),
        (nodes, "FREED_S", freed_times * nodes.FREED_S),
    ):
        if seconds is not None:
            patch.setattr(module, name, seconds)


def add_policy(patch: Any, make: Callable[[Any], Any]) -> None:
    """Add what this returns for an operator to its policies, as a line in `torch/step/order.py` does."""
    from raysgd.torch import TrainingOperator

    original = TrainingOperator._make_policies
    patch.setattr(TrainingOperator, "_make_policies", lambda self: [*original(self), make(self)])


def change_order(change: Callable[[Any], Any]) -> Any:
    """Return a context in which the ranks agree on what this makes of an epoch's order."""
    from raysgd.torch.data.sampling import agree

    def agreed(order: Any, recipe: Any, *, first: bool) -> tuple[Any, None]:
        return change(agree(order, recipe, first=first)[0]), None

    return patched("raysgd.torch.data.sampling.agree", agreed)


def send_ahead(patch: Any) -> None:
    """Let batches be sent to the device in advance, as on GPUs."""
    from raysgd.replica.steps.feed import Carrier

    patch.setattr(
        "raysgd.torch.replica.make_carrier", lambda device, **options: type("Ahead", (Carrier,), {"ahead": True})()
    )

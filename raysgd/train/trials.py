"""A training function as a Tune trial: starts workers in the trial's bundles, and passes on their
reports. Worker.

perform(workers, job)
    start from the trial's checkpoint, if it has one (it was killed or paused, or copies another trial)
    every rank has reported  -> rank 0's metrics go to Tune, with the newest checkpoint if there is a new one
    Tune stops the trial     -> its workers end with it

The remaining workers handle worker failures within the trial. Tune restarts trials whose own
process failed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import ray.tune as tune
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("raysgd.tune needs Ray Tune: pip install 'raysgd[tune]'") from error

from ray.tune.trainable import wrap_function

from raysgd.storage import locations
from raysgd.train import in_trial
from raysgd.train.checkpoint import DICT_FILE, Checkpoint, unlist_metadata
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.driver import FunctionDriver, TrainingIterator
from raysgd.train.job import FunctionJob, FunctionWorkers, function_name
from raysgd.workers.cluster import foreign
from raysgd.workers.serialization import pickler_class


def make_function_trainable(workers: FunctionWorkers, job: FunctionJob) -> Any:
    """Return a Trainable class, whose trials run the job with their own config."""

    def run(config: dict[str, Any]) -> None:
        perform(workers, replace(job, config=config))

    bundles = [{"CPU": 1.0}, *[workers.resources.as_dict()] * workers.num_workers]
    return wrap_function(tune.with_resources(run, make_placement(bundles)), name=function_name(job.function))


def as_trainable(function: Any) -> Any:
    """Make a Trainable class for `function`, a function of a trial's config."""
    return wrap_function(function, name=function._name)


def make_placement(bundles: Sequence[Mapping[str, float]], strategy: str = "PACK") -> Any:
    """Return a trial's placement group: the first bundle for the trial, the others for workers."""
    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return tune.PlacementGroupFactory(wanted, strategy=strategy)


def perform(workers: FunctionWorkers, job: FunctionJob) -> None:
    """Run the job to its end on such workers, in this trial."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raysgd-trial-")))
        job = replace(job, checkpoint_config=None, trial=in_trial.describe())
        manager = job.make_manager(folder)
        if (found := tune.get_checkpoint()) is not None:  # the trial's own, instead of the job's
            manager.payload = in_trial.bytes_of(found, pickler_class())
            manager.latest_id = int(found.get_metadata().get(in_trial.NUMBER, manager.latest_id))
        handover = Handover(folder, manager)
        executor = FunctionDriver(workers)
        stack.callback(executor.shutdown)
        executor.start(job.hook)
        rounds = TrainingIterator(executor)
        rounds.begin(job, manager)
        last: dict[str, Any] = {}
        while (result := rounds.next_round()) is not None:
            last = {name: in_trial.without_tensors(value) for name, value in result.rows[0].items()}
            tune.report(last, checkpoint=handover.take(result.checkpoint_id))
        if manager.latest_id > handover.taken:  # saved after the last report
            tune.report(last, checkpoint=handover.take(manager.latest_id))


class TrialReports:
    """Adds the newest checkpoint of a `Trainer` in a function of Tune to what that reports without
    one, as Ray Train 1.x did. Owns the last one's number, and the last metrics."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager, self._taken = manager, manager.latest_id
        self._trial = in_trial.describe()["trial_id"]
        self._last: Mapping[str, Any] | None = None
        self._report = foreign.replace_report_to_tune(self)

    def __call__(self, metrics: Mapping[str, Any], checkpoint: Any = None, **more: Any) -> None:
        number, payload = self._manager.latest_id, self._manager.payload
        with ExitStack() as stack:
            if self._trial == in_trial.describe()["trial_id"]:  # Tune can use the process for another trial
                if checkpoint is None and number > self._taken and payload is not None:
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raysgd-trial-"))
                    checkpoint = in_trial.store(Checkpoint.from_bytes(payload, trusted=True), folder)
                    checkpoint.update_metadata({in_trial.NUMBER: number})
                self._last, self._taken = metrics, number
            self._report(metrics, checkpoint=checkpoint, **more)

    def end(self) -> None:
        """Repeat the last report if a checkpoint was saved after it."""
        if self._last is not None and self._manager.latest_id > self._taken:
            self(self._last)


class Handover:
    """Owns the folder of checkpoints that Tune has not taken, and the number of the last taken."""

    def __init__(self, folder: Path, manager: CheckpointManager) -> None:
        self._folder, self._manager = folder, manager
        self.taken = manager.latest_id

    def take(self, number: int) -> Any:
        """Take this checkpoint for a report, or None if Tune has it. Delete older ones."""
        if number <= self.taken:
            return None
        self._delete(before=number)
        self.taken = number
        stored = self._place(number)
        if stored.is_file():
            folder = self._folder / f"taken_{number}"
            folder.mkdir()
            os.replace(stored, folder / DICT_FILE)
            stored = folder
        unlist_metadata(stored)
        checkpoint = tune.Checkpoint.from_directory(str(stored))
        checkpoint.update_metadata({in_trial.NUMBER: number})
        return checkpoint

    def _delete(self, *, before: int) -> None:
        for number in range(max(self.taken, 0), before):
            for path in (self._place(number), self._folder / f"taken_{number}"):
                locations.delete(path)

    def _place(self, number: int) -> Path:
        place = self._manager.place_of(number)
        assert isinstance(place, Path), "the folder is local"
        return place

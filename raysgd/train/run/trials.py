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

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
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
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.driver import FunctionDriver, TrainingIterator
from raysgd.train.run.job import FunctionJob, FunctionWorkers, function_name
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
        if (checkpoint := tune.get_checkpoint()) is not None:  # the trial's own, instead of the job's
            manager.payload = in_trial.bytes_of(checkpoint, pickler_class())
            manager.latest_id = int(checkpoint.get_metadata().get(in_trial.NUMBER, manager.latest_id))
        newest = manager.latest_id
        executor = FunctionDriver(workers)
        stack.callback(executor.shutdown)
        executor.start(job.hook)
        rounds = TrainingIterator(executor)
        rounds.begin(job, manager)
        last: dict[str, Any] = {}
        while (result := rounds.next_round()) is not None:
            last = {name: in_trial.without_tensors(value) for name, value in result.rows[0].items()}
            newest = _pass_on(last, manager, newest, result.checkpoint_id)
        if manager.latest_id > newest:  # saved after the last report
            _pass_on(last, manager, newest, manager.latest_id)


def _pass_on(metrics: dict[str, Any], manager: CheckpointManager, taken: int, newest: int) -> int:
    """Report to Tune, with the newest stored checkpoint unless that is the one last `taken`, and
    delete it here with those before. Return its number."""
    if newest <= taken:
        tune.report(metrics)
        return taken
    places = [manager.place_of(number) for number in range(max(taken + 1, 0), newest + 1)]
    with in_trial.stored(Checkpoint(places[-1], trusted=True), newest) as checkpoint:
        tune.report(metrics, checkpoint=checkpoint)
    for each in places:
        locations.delete(each)
    return newest


class TrialReports:
    """Adds the newest checkpoint of a `Trainer` in a function of Tune to what that reports without
    one, as Ray Train 1.x did. Owns the last one's number, and the last metrics."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager, self._number = manager, manager.latest_id
        self._trial = in_trial.describe()["trial_id"]
        self._last: Mapping[str, Any] | None = None
        self._report = foreign.replace_report_to_tune(self)

    def __call__(self, metrics: Mapping[str, Any], checkpoint: Any = None, **more: Any) -> None:
        number, payload = self._manager.latest_id, self._manager.payload
        context: Any = nullcontext(checkpoint)
        if self._trial == in_trial.describe()["trial_id"]:  # Tune can use the process for another trial
            if checkpoint is None and number > self._number and payload is not None:
                context = in_trial.stored(Checkpoint.from_bytes(payload, trusted=True), number)
            self._last, self._number = metrics, number
        with context as content:
            self._report(metrics, checkpoint=content, **more)

    def end(self) -> None:
        """Repeat the last report if a checkpoint was saved after it."""
        if self._last is not None and self._manager.latest_id > self._number:
            self(self._last)

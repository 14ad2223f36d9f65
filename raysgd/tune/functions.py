"""A training function as a Tune trial: the trial starts workers in the bundles it holds, and passes on what they report.

perform(job)
    begin from the trial's checkpoint, if it has one (it was killed, paused, or copies another trial)
    every rank has reported  -> rank 0's metrics go to Tune, with the newest checkpoint if there is a new one
    Tune stops the trial     -> its workers end with it

A loss of workers is dealt with in the trial, by those that are left. Tune starts trials again that died as a whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.trainable import wrap_function

from raysgd.train.checkpoint import DICT_FILE, Checkpoint, unlist_metadata
from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.fit.job import FunctionJob
from raysgd.train.fit.records import plain
from raysgd.train.iterator import TrainingIterator
from raysgd.workers.serialization import dumps

__all__ = ["FunctionTrial", "as_trainable", "perform", "placement"]

NUMBER = "_current_checkpoint_id"
IS_FILE = "_is_dictionary"


@dataclass(frozen=True)
class FunctionTrial:
    """What Tune calls: `job(config)` is the run that a trial's config means, `bundles(config)` what it asks for."""

    name: str
    job: Callable[[dict[str, Any]], FunctionJob]
    bundles: Callable[[dict[str, Any]], tuple[Sequence[Mapping[str, float]], str]]

    @property
    def _name(self) -> str:
        """Tune names the trials so."""
        return self.name

    def __call__(self, config: dict[str, Any]) -> None:
        perform(self.job(config))

    def _resources(self, config: dict[str, Any]) -> Any:
        """Tune reads this of functions."""
        return placement(*self.bundles(config))


def as_trainable(function: Any) -> Any:
    """A Trainable class of what is called with a trial's config."""
    return wrap_function(function, name=function._name)


def placement(bundles: Sequence[Mapping[str, float]], strategy: str = "PACK") -> Any:
    """The first bundle is the trial's own, the others are its workers'."""
    wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    return tune.PlacementGroupFactory(wanted, strategy=strategy)


def perform(job: FunctionJob) -> None:
    """Runs it to its end in this trial."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raysgd-trial-")))
        keeper = replace(job, checkpoint_config=None).keeper(folder)
        handover = Handover(folder, keeper)
        handover.receive(tune.get_checkpoint())
        executor = job.make()
        stack.callback(executor.shutdown)
        executor.start()
        job.begin(executor, folder, keeper, _described())
        rounds = TrainingIterator(executor)
        last: dict[str, Any] = {}
        while (told := rounds.next_round()) is not None:
            last = {name: plain(value) for name, value in told.rows[0].items()}
            tune.report(last, checkpoint=handover.give(told.checkpoint))
        if keeper.latest_id > handover.given:  # saved after the last report
            tune.report(last, checkpoint=handover.give(keeper.latest_id))


class Handover:
    """Owns the folder in which the run's checkpoints wait for Tune to take them, and how far it has."""

    def __init__(self, folder: Path, keeper: CheckpointKeeper) -> None:
        self._folder, self._keeper = folder, keeper
        self.given = keeper.latest_id

    def receive(self, found: Any) -> None:
        """The trial's own checkpoint goes before what the job began with; its number too."""
        if found is None:
            return
        notes = found.get_metadata()
        with found.as_directory() as folder:
            file = Path(folder) / DICT_FILE
            stored = file if notes.get(IS_FILE, file.is_file()) else Path(folder)
            self._keeper.payload = Checkpoint(stored, trusted=True).to_bytes(dumps=dumps)
        self._keeper.latest_id = self.given = int(notes.get(NUMBER, self.given))

    def give(self, number: int) -> Any:
        """What goes with a report: the newest checkpoint, if Tune has not had it. Older ones are dropped."""
        if number <= self.given:
            return None
        self._drop(before=number)
        self.given = number
        stored = self._place(number)
        is_file = stored.is_file()
        if is_file:
            folder = self._folder / f"given_{number}"
            folder.mkdir()
            os.replace(stored, folder / DICT_FILE)
            stored = folder
        unlist_metadata(stored)
        made = tune.Checkpoint.from_directory(str(stored))
        made.update_metadata({NUMBER: number, IS_FILE: is_file})
        return made

    def _drop(self, *, before: int) -> None:
        for number in range(max(self.given, 0), before):
            for path in (self._place(number), self._folder / f"given_{number}"):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def _place(self, number: int) -> Path:
        place = self._keeper.place_of(number)
        assert isinstance(place, Path), "the folder is a local one"
        return place


def _described() -> dict[str, Any]:
    context = tune.get_context()
    return {
        "experiment_name": context.get_experiment_name(),
        "trial_name": context.get_trial_name(),
        "trial_id": context.get_trial_id(),
        "trial_dir": context.get_trial_dir(),
        "trial_resources": context.get_trial_resources(),
    }

"""One `fit()`: finds the run its directory, begins it, writes down what is reported, and gives the result.

fit()
    a directory of its own, or that of the run that is restored: its checkpoints and reports are taken up
    the trainer's settings are written
    workers start, and run the function
        a round is complete -> callbacks hear it; rank 0's report is written
    workers end
    Result, or the error that ended it
"""

from __future__ import annotations

import itertools
import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from raysgd.train.callbacks import Callbacks
from raysgd.train.executor import BackendExecutor
from raysgd.train.iterator import TrainingIterator
from raysgd.train.job import FunctionJob
from raysgd.train.keeper import CheckpointKeeper
from raysgd.train.records import Past, Record, Who
from raysgd.train.result import Result
from raysgd.train.settings import RunConfig

__all__ = ["Fitting"]

logger = logging.getLogger("raysgd")

RESULTS = "ray_results"


class Fitting:
    """Owns the run's place. One object, one run."""

    def __init__(self, trainer: str, config: RunConfig, *, restored: Path | None) -> None:
        self._trainer, self._config = trainer, config
        self._past = None if restored is None else Past.read(restored)
        self.place = _new_place(trainer, config) if restored is None else restored

    def run(self, job: FunctionJob, settings: dict[str, bytes]) -> Result:
        callbacks = Callbacks(self._config.callbacks)
        who = Who(self._trainer, self.place.name)
        record = Record(self.place, self.place, who, job.config, self._past)
        keeper = job.keeper(self.place)
        if self._past is not None:
            keeper.adopt(self._past.reported_with())
        record.begin(settings)
        executor = job.make()
        try:
            values = self._follow(job, executor, keeper, record, callbacks)
        except BaseException as error:
            record.end(error)
            logger.error("%s: what this run saved is at %s; %s.restore(path) goes on from there", *self._told(error))
            raise
        finally:
            executor.shutdown()
        record.end(None)
        return Result.made(self.place, keeper, record.rows, log_dir=record.log_dir, return_values=values)

    def _follow(
        self,
        job: FunctionJob,
        executor: BackendExecutor,
        keeper: CheckpointKeeper,
        record: Record,
        callbacks: Callbacks,
    ) -> list[Any]:
        executor.start()
        job.begin(executor, record.log_dir, keeper, record.who.described(record.log_dir))
        record.started()
        rounds = TrainingIterator(executor)
        with closing(rounds.heard_by(callbacks, str(record.log_dir))) as heard:
            for told in heard:
                record.add(told.rows[0], told.checkpoint if told.checkpoint >= 0 else None)
        return rounds.get_final_results() or []

    def _told(self, error: BaseException) -> tuple[str, Path, str]:
        return type(error).__name__, self.place, self._trainer


def _new_place(trainer: str, config: RunConfig) -> Path:
    """A directory that is not there yet: a run never writes into another's."""
    home = Path.home() / RESULTS if config.storage_path is None else Path(config.storage_path).expanduser()
    name = config.name or f"{trainer}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    for number in itertools.count(1):
        place = home.absolute() / (name if number == 1 else f"{name}_{number}")
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        if number > 1:
            logger.warning("there is a run at %s already: this one is written to %s", home / name, place)
        return place
    raise AssertionError("counting never ends")

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

from raysgd.callbacks.base import Run
from raysgd.callbacks.history import History
from raysgd.storage import Place, Uri, copy_logs, names, place
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

    def __init__(self, trainer: str, config: RunConfig, *, restored: Place | None) -> None:
        self._trainer, self._config = trainer, config
        self._past = None if restored is None else Past.read(restored)
        self.place, self.log_dir = _new_place(trainer, config) if restored is None else (restored, _log_dir(restored))

    def run(self, job: FunctionJob, settings: dict[str, bytes], history: History) -> Result:
        callbacks = Callbacks(self._config.callbacks, history=history)
        who = Who(self._trainer, self.place.name)
        record = Record(self.place, self.log_dir, who, job.config, self._past)
        keeper = job.keeper(self.place)
        if self._past is not None:
            keeper.adopt(self._past.reported_with())
        record.begin(settings)
        executor = job.make()
        try:
            values = self._follow(job, executor, keeper, record, callbacks)
        except BaseException as error:
            self._failed(record, error)
            raise
        finally:
            executor.shutdown()
            copy_logs(self.log_dir, self.place)
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
        rounds = TrainingIterator(executor, callbacks)
        run = Run(
            trainer=self._trainer,
            name=getattr(job.function, "__name__", type(job.function).__name__),
            num_workers=executor.world_size,
            config=job.config,
            folder=Path(record.log_dir),
        )
        with closing(rounds.heard(run)) as heard:
            for told in heard:
                record.add(told.rows[0], told.checkpoint if told.checkpoint >= 0 else None)
        return rounds.get_final_results() or []

    def _failed(self, record: Record, error: BaseException) -> None:
        """Nothing that goes wrong in here may hide the error itself."""
        try:
            record.end(error)
        except Exception:
            logger.exception("the end of the run could not be written to %s", self.place)
        told = (type(error).__name__, self.place, self._trainer)
        logger.error("%s: what this run saved is at %s; %s.restore(path) goes on from there", *told)


def _new_place(trainer: str, config: RunConfig) -> tuple[Place, Path]:
    """Where nothing is yet, since a run never writes into another's; and its directory on this machine."""
    home = Path.home() / RESULTS if config.storage_path is None else place(config.storage_path)
    home = home.expanduser().absolute() if isinstance(home, Path) else home
    name = config.name or f"{trainer}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    for number in itertools.count(1):
        fresh = home / (name if number == 1 else f"{name}_{number}")
        if isinstance(fresh, Path):
            try:
                fresh.mkdir(parents=True)
            except FileExistsError:
                continue
        elif names(fresh):
            continue
        if number > 1:
            logger.warning("there is a run at %s already: this one is written to %s", home / name, fresh)
        return fresh, _log_dir(fresh)
    raise AssertionError("counting never ends")


def _log_dir(where: Place) -> Path:
    """Callbacks write into a directory of this machine, also where the run is stored elsewhere."""
    path = Path.home() / RESULTS / where.name if isinstance(where, Uri) else where
    path.mkdir(parents=True, exist_ok=True)
    return path

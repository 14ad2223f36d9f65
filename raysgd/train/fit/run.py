"""One `fit()`: finds the run its directory, begins it, writes down what is reported, and gives the result.

fit()
    a directory of its own, or that of the run that is restored: its checkpoints and reports are taken up
    the trainer's settings are written
    workers start, and run the function
        a round is complete -> rank 0's report is written; callbacks hear it
    workers end
    Result, or the error that ended it
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Run
from raysgd.callbacks.history import History
from raysgd.storage import locations
from raysgd.storage.locations import Place, Uri, copy_logs, names, place
from raysgd.storage.masking import mask
from raysgd.train.callbacks import RunCallbacks
from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.executor import BackendExecutor
from raysgd.train.fit.job import FunctionJob
from raysgd.train.fit.records import Past, Record, Who
from raysgd.train.fit.result import Result
from raysgd.train.fit.settings import RunConfig
from raysgd.train.iterator import TrainingIterator
from raysgd.train.run import Told

__all__ = ["Fitting"]

logger = logging.getLogger("raysgd")

RESULTS = "ray_results"
OWNER = ".stored-at"


class Fitting:
    """Owns the run's place. One object, one run."""

    def __init__(self, trainer: str, config: RunConfig, history: History, *, restored: Place | None) -> None:
        self._trainer = trainer
        self._callbacks = RunCallbacks(config.callbacks, history=history)  # first: what is refused leaves no directory
        self._past = None if restored is None else Past.read(restored)
        if restored is None:
            self.place, self.log_dir = _new_place(trainer, config)
        else:
            self.place, self.log_dir = restored, _log_dir(restored, again=True)

    def run(self, job: FunctionJob, settings: dict[str, bytes]) -> Result:
        who = Who(self._trainer, self.place.name, **({} if self._past is None else self._past.ids))
        record = Record(self.place, self.log_dir, who, job.config, self._past)
        keeper = job.keeper(self.place)
        if self._past is not None:
            keeper.adopt(self._past.reported_with())
        record.begin(settings)
        executor = job.make()
        try:
            values = self._follow(job, executor, keeper, record)
        except BaseException as error:
            self._failed(record, error)
            raise
        finally:
            executor.shutdown()
            copy_logs(self.log_dir, self.place)
        record.end(None)
        return Result.made(self.place, keeper, record.rows, log_dir=record.log_dir, return_values=values)

    def _follow(
        self, job: FunctionJob, executor: BackendExecutor, keeper: CheckpointKeeper, record: Record
    ) -> list[Any]:
        def write(told: Told) -> None:
            record.add(told.rows[0], told.checkpoint if told.checkpoint >= 0 else None)

        executor.start()
        record.started()
        rounds = TrainingIterator(executor, self._callbacks, record=write)
        described = record.who.described(record.log_dir)
        begin = functools.partial(job.begin, executor, record.log_dir, keeper, described)
        run = Run(
            trainer=self._trainer,
            name=getattr(job.function, "__name__", type(job.function).__name__),
            num_workers=executor.world_size,
            config=job.config,
            folder=Path(record.log_dir),
        )
        with closing(rounds.heard(run, begin)) as heard:
            for _ in heard:
                pass
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
    home = home.absolute() if isinstance(home, Path) else home
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


def _log_dir(where: Place, *, again: bool = False) -> Path:
    """Callbacks write into a directory of this machine, also where the run is stored elsewhere. There it must not be one of
    another run that happens to have the same name: `again` takes the one that this run has left."""
    if not isinstance(where, Uri):
        return where
    for number in itertools.count(1):
        path = Path.home() / RESULTS / (where.name if number == 1 else f"{where.name}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not (again and path.is_dir() and _left_by(path) in (str(where), None)):
                continue
        locations.write(path / OWNER, str(where).encode())
        return path
    raise AssertionError("counting never ends")


def _left_by(path: Path) -> str | None:
    """The URI of the run that has this directory; None if it is empty."""
    if (path / OWNER).is_file():
        return mask(locations.read(path / OWNER).decode())
    return "somebody else" if any(path.iterdir()) else None

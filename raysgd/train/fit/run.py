"""One call of `fit()`: finds the run's directory, starts the function, and writes what it reports.
Driver.

fit()
    take a new directory; or that of the run that is restored, with its checkpoints and reports
    write the trainer's settings
    start the workers, and run the function
        a round is complete -> write rank 0's report, and call the callbacks
    end the workers
    return the Result, or raise the error that ended the run
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Run
from raysgd.callbacks.folder import RESULTS, create_new_folder, numbered, timestamp
from raysgd.callbacks.history import History
from raysgd.storage import locations
from raysgd.storage.locations import Place, copy_logs, names, place
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri
from raysgd.train.callbacks import make_callback_list
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.executor import BackendExecutor, FunctionJob
from raysgd.train.fit.records import RunRecord, StoredRun
from raysgd.train.fit.result import Result
from raysgd.train.iterator import TrainingIterator
from raysgd.train.run import RoundResult, function_name
from raysgd.train.settings import RunConfig

logger = logging.getLogger("raysgd")

OWNER = ".stored-at"


class FitRun:
    """Owns the directory of one run."""

    def __init__(self, trainer: str, config: RunConfig, history: History, *, restored: Place | None) -> None:
        self._trainer, self._config = trainer, config
        # First, because invalid callbacks must not leave a directory behind.
        self._callbacks = make_callback_list(config.callbacks, history=history)
        self._past = None if restored is None else StoredRun.read(restored)
        self._restored = restored

    def run(self, job: FunctionJob, settings: dict[str, bytes]) -> Result:
        """Run the function to its end. `settings` are the trainer's, pickled."""
        executor = job.make()  # first, because invalid settings must not leave a directory behind
        if self._restored is None:
            where, log_dir = _new_place(self._trainer, self._config)
        else:
            where, log_dir = self._restored, _log_dir(self._restored, resume=True)
        record = RunRecord(where, log_dir, self._trainer, job.config, self._past)
        manager = job.manager(where)
        if self._past is not None:
            manager.adopt(self._past.reported_with())
        record.begin(settings)
        try:
            values = self._run_function(job, executor, manager, record)
            record.end(None)
        except BaseException as error:
            self._record_failure(record, error)
            raise
        finally:
            executor.shutdown()
            copy_logs(log_dir, where)
        return Result.of(where, manager, record.rows, log_dir=log_dir, return_values=values)

    def _run_function(
        self, job: FunctionJob, executor: BackendExecutor, manager: CheckpointManager, record: RunRecord
    ) -> list[Any]:
        def write(result: RoundResult) -> None:
            record.add(result.rows[0], result.checkpoint_id if result.checkpoint_id >= 0 else None)

        executor.start()
        record.started()
        rounds = TrainingIterator(executor, self._callbacks, record=write)
        begin = functools.partial(job.begin, executor, manager, record.trial())
        run = Run(
            trainer=self._trainer,
            functions=True,
            name=function_name(job.function),
            num_workers=executor.world_size,
            processes=executor.processes,
            config=job.config,
            folder=Path(record.log_dir),
        )
        return rounds.run_to_end(run, begin)

    def _record_failure(self, record: RunRecord, error: BaseException) -> None:
        """Write the end of the run. An error in here must not hide the error that ended the run."""
        try:
            record.end(error)
        except Exception:
            logger.exception("could not write the end of the run to %s", record.where)
        logger.error(
            "%s: the checkpoints and reports of this run are in %s; %s.restore(path) resumes it",
            type(error).__name__,
            record.where,
            self._trainer,
        )


def _new_place(trainer: str, config: RunConfig) -> tuple[Place, Path]:
    """Return where the run is stored, and its directory here: new ones, of no other run."""
    home = Path.home() / RESULTS if config.storage_path is None else place(config.storage_path)
    home = home.absolute() if isinstance(home, Path) else home
    name = config.name or f"{trainer}_{timestamp()}"
    if isinstance(home, Path):
        new: Place = create_new_folder(home, name)
    else:
        new = home / next(candidate for candidate in numbered(name) if not names(home / candidate))
    if new != home / name:
        logger.warning("there is a run at %s already: this run is stored at %s", home / name, new)
    return new, _log_dir(new)


def _log_dir(where: Place, *, resume: bool = False) -> Path:
    """Return the directory here where callbacks write. For a URI it is a new one, because another
    run may have used the name, or with `resume` that of this run."""
    if not isinstance(where, Uri):
        return where
    for path in (Path.home() / RESULTS / name for name in numbered(where.name)):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not (resume and path.is_dir() and _owner(path) in (str(where), None)):
                continue
        locations.write(path / OWNER, str(where).encode())
        return path
    raise AssertionError("there is always another number")


def _owner(path: Path) -> str | None:
    """Return the URI of the run that uses this directory, or None if it is empty."""
    if (path / OWNER).is_file():
        return mask(locations.read(path / OWNER).decode())
    return "another run" if any(path.iterdir()) else None

"""One call of `fit()`: finds the run's directory, starts the function, and writes what it reports.
Driver.

fit()
    take over the workers that a script with this name has left, if there are any
    take a new directory; or that of the run that is restored, or taken over, with its checkpoints and reports
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
from raysgd.errors import ConfigError
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
from raysgd.train.named import Naming
from raysgd.train.run import RoundResult, RunLeft, function_name
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

    @property
    def naming(self) -> Naming | None:
        """Return the name of workers that outlive the script, if they do."""
        if self._config.orphan_s is None:
            return None
        home = _home(self._config) if self._restored is None else self._restored.parent
        earlier = 0 if self._past is None else len(self._past.rows)
        return Naming(str(self._config.name), self._config.orphan_s, str(home), earlier)

    def run(self, job: FunctionJob, settings: dict[str, bytes]) -> Result:
        """Run the function to its end. `settings` are the trainer's, pickled."""
        executor, outlives = job.make(), self._config.orphan_s is not None
        try:
            if outlives:
                executor.start()
            left = executor.left_of(job.function, job.config)
            where, log_dir, past = self._find(left, executor.earlier)
            record = RunRecord(where, log_dir, self._trainer, job.config, past, outlives=outlives)
            manager = job.manager(where)
            if past is not None and left is None:
                manager.adopt(past.reported_with())
            record.begin(settings)
        except BaseException:
            executor.shutdown(leave=outlives)
            raise
        leave = superseded = False
        try:
            values = self._run_function(job, executor, manager, record)
            record.end(None)
        except BaseException as error:
            leave = outlives and not isinstance(error, SystemExit)
            superseded = executor.superseded
            if not superseded:
                self._record_failure(record, error)
            raise
        finally:
            executor.shutdown(leave=leave)
            if not superseded:
                copy_logs(log_dir, where)
        return Result.of(where, manager, record.rows, log_dir=log_dir, return_values=values)

    def _find(self, left: RunLeft | None, earlier: int) -> tuple[Place, Path, StoredRun | None]:
        """Return where the run is stored, its directory here, and what it has written: there were
        `earlier` reports when the script began that has `left` the run."""
        if left is not None and self._restored not in (None, left.directory):
            raise ConfigError(
                f"the run called {self._config.name!r} that waits for a script is in {left.directory}, and this script restores "
                f"{self._restored}: restore that one, or end its workers with `raysgd end {self._config.name}`"
            )
        if left is not None:
            past = StoredRun.read(left.directory).cut(earlier + left.reports - len(left.unshown))
            return left.directory, _log_dir(left.directory, resume=True), past
        if self._restored is not None:
            return self._restored, _log_dir(self._restored, resume=True), self._past
        return *_new_place(self._trainer, self._config), None

    def _run_function(
        self, job: FunctionJob, executor: BackendExecutor, manager: CheckpointManager, record: RunRecord
    ) -> list[Any]:
        def write(result: RoundResult) -> None:
            if executor.superseded:  # the directory is the other script's
                return
            record.add(result.rows[0], result.checkpoint_id if result.checkpoint_id >= 0 else None)

        if not executor.is_started:
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
    home = _home(config)
    name = config.name or f"{trainer}_{timestamp()}"
    if isinstance(home, Path):
        new: Place = create_new_folder(home, name)
    else:
        new = home / next(candidate for candidate in numbered(name) if not names(home / candidate))
    if new != home / name:
        logger.warning("there is a run at %s already: this run is stored at %s", home / name, new)
    return new, _log_dir(new)


def _home(config: RunConfig) -> Place:
    home = Path.home() / RESULTS if config.storage_path is None else place(config.storage_path)
    return home.absolute() if isinstance(home, Path) else home


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

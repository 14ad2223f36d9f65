"""One call of `fit()`: finds the run's directory, starts the function, and writes what it reports.
Driver.

fit()
    take a new directory; or that of the run that is restored, with its checkpoints and reports
    write the trainer's settings
    start the workers, and run the function
        a round is complete -> its checkpoint and rank 0's metrics are written, and its reports return;
                               the callbacks are called
    end the workers
    return the Result, or raise the error that ended the run
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from raysgd.callbacks.folder import RESULTS, create_new_folder, numbered, timestamp
from raysgd.callbacks.history import History
from raysgd.storage import locations
from raysgd.storage.locations import Place, copy_logs, names, place
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri
from raysgd.train.callbacks import make_callback_list
from raysgd.train.driver import FunctionDriver, TrainingIterator
from raysgd.train.fit.records import RunRecord, StoredRun
from raysgd.train.fit.result import Result
from raysgd.train.job import FunctionJob, FunctionWorkers
from raysgd.train.settings import RunConfig

logger = logging.getLogger("raysgd")

OWNER = ".stored-at"


def run_and_store(
    workers: FunctionWorkers,
    job: FunctionJob,
    trainer: str,
    config: RunConfig,
    settings: dict[str, bytes],
    history: History,
    past: Place | None,
    overridden: bool,
) -> Result:
    """Run the function to its end. `settings` are the trainer's, pickled. `past` is where the run
    is that this one resumes, from the job's checkpoint if that is `overridden`."""
    # These first, because invalid callbacks and settings must not leave a directory behind.
    callbacks, executor = make_callback_list(config.callbacks, history=history), FunctionDriver(workers)
    stored = None if past is None else StoredRun.read(past)
    where, log_dir = _choose_place(trainer, config) if past is None else (past, _choose_log_dir(past, resume=True))
    record, manager = RunRecord(where, log_dir, trainer, job.config, stored), job.make_manager(where)
    if stored is not None:
        given = manager.payload
        manager.adopt(stored.metrics_by_checkpoint())
        manager.payload = given if overridden else manager.payload
    record.begin(settings)

    try:
        executor.start(job.hook)
        record.note_start()
        rounds = TrainingIterator(executor, callbacks)
        job = replace(job, trial=record.trial(), record=record.add)
        values = rounds.run_to_end(job, manager, trainer=trainer, folder=log_dir)
        record.end(None)
    except BaseException as error:
        _record_failure(record, trainer, error)
        raise
    finally:
        executor.shutdown()
        copy_logs(log_dir, where)
    return Result.of(where, manager, record.rows, log_dir=log_dir, return_values=values)


def _record_failure(record: RunRecord, trainer: str, error: BaseException) -> None:
    """Write the end of the run. An error in here must not hide the error that ended the run."""
    try:
        record.end(error)
    except Exception:
        logger.exception("could not write the end of the run to %s", record.where)
    text = "%s: the checkpoints and reports of this run are in %s; %s.restore(path) resumes it"
    logger.error(text, type(error).__name__, record.where, trainer)


def _choose_place(trainer: str, config: RunConfig) -> tuple[Place, Path]:
    """Choose where the run is stored, and its directory here: new ones, of no other run."""
    home = Path.home() / RESULTS if config.storage_path is None else place(config.storage_path)
    home = home.absolute() if isinstance(home, Path) else home
    name = config.name or f"{trainer}_{timestamp()}"
    if isinstance(home, Path):
        new: Place = create_new_folder(home, name)
    else:
        new = home / next(candidate for candidate in numbered(name) if not names(home / candidate))
    if new != home / name:
        logger.warning("there is a run at %s already: this run is stored at %s", home / name, new)
    return new, _choose_log_dir(new)


def _choose_log_dir(where: Place, *, resume: bool = False) -> Path:
    """Choose the directory here where callbacks write. For a URI it is a new one, because another
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
    """The URI of the run that uses this directory, or None if it is empty."""
    if (path / OWNER).is_file():
        return mask(locations.read(path / OWNER).decode())
    return "another run" if any(path.iterdir()) else None

"""The loop over `trainer.epochs()`: it makes checkpoints, and continues where a killed script was.
Driver."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.callbacks.history import History
from raysgd.errors import CheckpointError, ConfigError
from raysgd.training.auto_checkpoint import AutoCheckpoint, CheckpointFolder, SavedPlace

logger = logging.getLogger("raysgd")


def opened_folder(checkpoints: Any, resume: Any, suffix: str) -> CheckpointFolder | None:
    """Return the folder that a trainer's arguments `checkpoints` and `resume` mean, None without
    checkpoints."""
    if checkpoints is not None and not isinstance(checkpoints, AutoCheckpoint):
        raise ConfigError(f"checkpoints must be a raysgd.AutoCheckpoint(path=...), got {checkpoints!r}")
    if resume not in (None, "auto"):
        raise ConfigError(f"resume must be 'auto' or None, got {resume!r}. To begin with a certain file, call load()")
    if checkpoints is None:
        if resume is not None:
            raise ConfigError("resume='auto' needs a folder: pass checkpoints=AutoCheckpoint(path=...), too")
        return None
    folder = CheckpointFolder(checkpoints, suffix)
    if resume is None:
        folder.refuse_earlier_run()
    return folder


class EpochLoops:
    """Owns where the script is in its loops over `epochs()`, and when the next automatic checkpoint
    is due.

    workers    the trainer's `num_workers`
    step       returns how many batches have been trained
    start      copies the state, and returns a function that waits until it is in the file of this
               path
    stop       returns whether a callback wants the loop to end, once
    scheduled  returns whether the operator has registered schedulers
    begun      is called with the number of the loop and its epochs that are done when a body
               begins, and returns how many rows the history has of it already
    script     returns what a checkpoint's record has of the script: `made`, the calls of the
               running body, and `wants`, which callbacks want the loop to end
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        history: History,
        *,
        workers: int,
        step: Callable[[], int],
        start: Callable[[str], Callable[[], Any]],
        stop: Callable[[], bool],
        scheduled: Callable[[], bool],
        begun: Callable[[int, int], int] = lambda loop, done: 0,
        script: Callable[[], dict[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._history = folder, history
        self._step, self._start, self._stop, self._clock = step, start, stop, clock
        self._workers, self._scheduled, self._begun, self._script = workers, scheduled, begun, script
        self._loop, self._done, self._count = 0, 0, 0
        self._resumed: SavedPlace | None = None
        self._record: dict[str, Any] = {}  # of that checkpoint
        self._is_inside = False  # whether the body that was running had not ended
        self._rows_before: int | None = None  # of the history, when the body of the loop began; None outside of it
        self._calls = 0  # of `train` in this body
        self._mark, self._saved_at = 0, clock()
        self._pauses, self._pause_at = False, -1
        self._chunk, self._began, self._per_s = 1, (0, 0.0), 0.0

    @property
    def epochs(self) -> int | None:
        """Return how many epochs the loop has whose body is running."""
        return None if self._rows_before is None else self._count

    @property
    def resumed(self) -> SavedPlace | None:
        """Return the checkpoint from which this trainer has resumed."""
        return self._resumed

    @property
    def place(self) -> tuple[int, int]:
        """Return the loop in which this trainer has resumed, and how many of its epochs were
        done."""
        return (0, 0) if self._resumed is None else (self._resumed.loop, self._resumed.done)

    def attach(self, loop: int, done: int) -> None:
        """Continue where another script has left this trainer's workers."""
        self._resumed, self._is_inside = SavedPlace(loop, done, self._step()), True

    def resume(self, load: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint that is not damaged, if there is any. Return its record."""
        folder, tried = self._folder, ""
        for place in folder.newest_first() if folder is not None else ():
            assert folder is not None
            path = folder.path(place) or ""
            try:
                load(path)
            except (CheckpointError, ConfigError, OSError) as error:
                if not folder.is_damaged(place):
                    raise CheckpointError(
                        f"resume='auto' found a checkpoint that this trainer cannot load: {error}. To start from the beginning, pass "
                        "another path"
                    ) from error
                logger.warning("%s is damaged, so training resumes from an older checkpoint: %s", tried := path, error)
                continue
            for damaged in [newer for newer in folder.newest_first() if newer > place]:
                folder.forget(damaged)
            self._resumed, self._mark = place, place.step
            logger.info("training resumes from %s", path)
            self._record = folder.record(place)
            self._is_inside = self._record.get("made") is not None
            return self._record
        if tried:
            raise CheckpointError(
                f"all checkpoints in {folder} are damaged: to start from the beginning, pass another path"
            )
        return None

    def refuse_load(self, call: str) -> None:
        """Raise an error for a load that would replace the state with which the trainer has
        resumed."""
        if self._resumed is not None and self._loop == 0 and self._folder is not None:
            raise ConfigError(
                f"the trainer has resumed from {self._folder.path(self._resumed)}, and {call} would replace that: call it only "
                "if trainer.resumed_from is None"
            )

    def note_change(self, call: str) -> None:
        """Warn of a change of the state between two loops that an earlier script has made there."""
        saved = self._resumed
        if saved is not None and self._rows_before is None and 0 < self._loop < saved.loop:
            logger.warning(
                "%s is called after loop %d over trainer.epochs(), and training was in loop %d when the script ended: code between "
                "loops runs again, and this changes the state a second time. Make the change in the body of a loop, or only if "
                "trainer.resumed_from is None",
                call,
                self._loop,
                saved.loop,
            )

    # -- the loop -------------------------------------------------------------------------------------

    def run(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs of this loop that are not done yet, from 1 to `count`."""
        self._loop += 1
        self._rows_before, self._count = None, count
        number, saved = self._loop, self._resumed
        done = 0 if saved is None or number > saved.loop else saved.done if number == saved.loop else count
        if done and number == (saved.loop if saved else 0) and not self._is_inside and self._stop():
            return  # it was ended by a callback, and the script was killed afterwards
        if saved is not None and number == saved.loop:
            self._warn_of_old_schedule(count)
        if saved is not None and number < saved.loop:
            logger.warning(
                "loop %d over trainer.epochs() has no epochs left: training was in loop %d when the script ended. Each call of "
                "trainer.epochs() begins a loop, also if a notebook's cell is run again",
                number,
                saved.loop,
            )
        for epoch in range(done + 1, count + 1):
            self._done, self._calls = epoch - 1, 0
            self._rows_before = len(self._history) - self._begun(number, epoch - 1)
            try:
                yield epoch
                rows_before = self._rows_before
                if rows_before is None or number != self._loop:
                    raise ConfigError(
                        "a loop over trainer.epochs() must not begin inside another one: end the first one"
                    )
            finally:
                if number == self._loop:
                    self._rows_before = None
            self._done = epoch
            script = {**self._script(), "made": None}
            stops = self._stop()
            self._after_body(rows_before, script, last=stops or epoch == count)
            if stops:
                break
        if self._folder is not None:
            self._folder.wait()

    def _warn_of_old_schedule(self, count: int) -> None:
        """Warn if the resumed loop has another number of epochs, or of workers, than the
        checkpoint's schedules."""
        now = {"epochs": count, "workers": self._workers}
        before = {name: self._record.get(name, number) for name, number in now.items()}
        if before != now and self._scheduled():
            logger.warning(
                "training resumes from a run with epochs=%d and num_workers=%d, and this one has epochs=%d and "
                "num_workers=%d. The schedulers continue as they were saved, with the length of the earlier run: to change them, "
                "call trainer.apply_all_operators(...) before the loop, or start a new run in another folder",
                *before.values(),
                *now.values(),
            )

    def _after_body(self, rows_before: int, script: dict[str, Any], *, last: bool) -> None:
        folder = self._folder
        if folder is None:
            return
        score = self._score(rows_before, folder.settings.best)
        if last or folder.settings.every == "epoch" or self._is_due() or folder.improves(score):
            self._save(script, score)

    def _score(self, rows_before: int, name: str | None) -> float | None:
        """Return the newest value of a metric that was measured in this body. Raise an error if a
        validation did not measure it."""
        own = name is not None and name.startswith("test_")  # or else a test does not choose the model
        rows = [row for row in self._history[rows_before:] if own or row["kind"] != "test"]
        found = [row[name] for row in rows if isinstance(row.get(name), (int, float))] if name is not None else []
        if found or name is None:
            return float(found[-1]) if found else None
        if any(row["kind"] == "validate" for row in rows):
            measured = sorted({each for row in rows for each, value in row.items() if isinstance(value, (int, float))})
            raise ConfigError(f"AutoCheckpoint(best={name!r}) was not measured: choose one of {', '.join(measured)}")
        return None

    def _save(self, script: dict[str, Any], score: float | None = None) -> None:
        assert self._folder is not None
        place = SavedPlace(self._loop, self._done, self._step())
        run = {"epochs": self._count, "workers": self._workers, **script}
        self._folder.save(place, score, self._history, self._start, **run)
        self._mark, self._saved_at = place.step, self._clock()

    def _is_due(self) -> bool:
        assert self._folder is not None
        every = self._folder.settings.every
        if isinstance(every, int):
            return self._step() // every > self._mark // every
        return every != "epoch" and self._clock() - self._saved_at >= every

    def close(self, *, force: bool) -> None:
        """Wait for a save that is running, unless by force, and log its error. Let other trainers
        use the folder."""
        if self._folder is None:
            return
        try:
            if not force:
                self._folder.wait()
        except CheckpointError as error:
            logger.error("%s", error)
        finally:
            self._folder.release()

    # -- within a call of `train` -----------------------------------------------------------------------

    def begin_call(self, num_steps: int | None) -> None:
        """Note a call of `train`. Only the first one of a body pauses for checkpoints: a restarted
        script repeats the body, and its first call trains the rest of the epoch."""
        inside = self._rows_before is not None
        if not inside and self._folder is not None:
            raise ConfigError(
                "with checkpoints=AutoCheckpoint(...), train() must be called in a loop over trainer.epochs(n), which makes "
                "the checkpoints: write `for epoch in trainer.epochs(10):`, or call trainer.fit(10)"
            )
        self._calls += 1
        every = self._folder.settings.every if self._folder is not None else "epoch"
        self._pauses = every != "epoch" and self._calls == 1 and num_steps is None
        self._chunk, self._per_s = 1, 0.0

    def next_pause(self) -> dict[str, Any]:
        """Return before which batch the call is to pause, as an argument of the workers' call."""
        self._pause_at = -1
        if not self._pauses:
            return {}
        assert self._folder is not None
        every, step, now = self._folder.settings.every, self._step(), self._clock()
        if isinstance(every, int):
            self._pause_at = (step // every + 1) * every
        else:
            # All ranks must pause at the same batch, so seconds are converted to batches, at the speed of the last ones.
            left = (self._saved_at + float(every) - now) * self._per_s
            self._chunk = max(1, min(math.ceil(left), 2 * self._chunk))
            self._pause_at = step + self._chunk
        self._began = (step, now)
        return {"pause_at": self._pause_at}

    def paused(self) -> bool:
        """Make a checkpoint if it is due, while all ranks are between two batches. Return False if
        it was not this object that wanted the pause."""
        step = self._step()
        if not self._pauses or step < self._pause_at:
            return False
        self._per_s = (step - self._began[0]) / max(self._clock() - self._began[1], 1e-6)
        if self._is_due():
            try:
                self._save(self._script())
            except CheckpointError as error:
                if self._step() >= step:
                    raise
                # All workers have failed, so the call continues from a snapshot, and comes here again.
                logger.warning("no checkpoint was saved after step %d: %s", step, error)
        return True

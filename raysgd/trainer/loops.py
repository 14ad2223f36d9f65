"""The loop over `trainer.epochs()`: it makes checkpoints, and continues where a killed script was.
Driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from raysgd.config import object_of
from raysgd.core.measures.metrics import unmeasured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Ok
from raysgd.engine.call import EARLIER, PartialResults
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, ConfigError, counted
from raysgd.trainer.auto_checkpoint import AutoCheckpoint, CheckpointFolder, SavedPlace, is_finite, measured_in
from raysgd.trainer.call_runner import CallRunner, exclusive
from raysgd.trainer.loads import Loads
from raysgd.trainer.saves import SaveHandle, Saves
from raysgd.trainer.within_call import Contents, Schedule, WithinCall
from raysgd.workers.transfer import AnyTransfer

logger = logging.getLogger("raysgd")

NO_EPOCHS = (
    "loop %d over trainer.epochs() has no epochs left, because training was in loop %d when the script ended. Each call of "
    "trainer.epochs() begins a new loop, even if a notebook's cell is only run again"
)
ALL_DONE = "nothing is left to train: the loop over trainer.epochs(%d) had ended when the script did"
NOT_FINITE = (
    "training resumes from %s, whose loss, score or weights were not finite. To continue from an older checkpoint, load() it in a new "
    "run with another path"
)
WEIGHTS_NOT_FINITE = (
    "%s has elements that are infinite or NaN, although no loss of this epoch is. The checkpoint of this epoch counts as not finite, "
    "and the newest one before it stays. To end training before such a step, pass TrainingOptions(on_nonfinite='raise')"
)
NEVER_MEASURED = "AutoCheckpoint(best=%r) had no effect, because no result had this metric"
LEFT = (
    "the script left the loop over trainer.epochs() in epoch %d, which had trained. An automatic checkpoint is made when the loop's "
    "body ends, so this epoch has none, and the newest one is %s. To stop after the checkpoint, use a callback such as EarlyStopping. "
    "Ignore this if you have called save()"
)


def opened_folder(checkpoints: Any, resume: Any, suffix: str) -> CheckpointFolder | None:
    """Open the folder that a trainer's arguments `checkpoints` and `resume` mean, None without
    checkpoints."""
    object_of(AutoCheckpoint, "checkpoints", checkpoints)
    if resume not in (None, "auto"):
        raise ConfigError(f"resume must be 'auto' or None, got {resume!r}. To begin with a certain file, call load()")
    if checkpoints is None:
        if resume is not None:
            raise ConfigError("resume='auto' needs a folder: pass checkpoints=AutoCheckpoint(path=...), too")
        return None
    folder = CheckpointFolder(checkpoints, suffix, resumes=resume is not None)
    if not folder.resumes:
        folder.refuse_earlier_run()
    return folder


class EpochLoops:
    """Owns where the script is in its loops over `epochs()`, and when the next automatic checkpoint
    is due.

    not_finite  returns the name of a parameter that is not finite, if there is one
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        engine: Engine,
        calls: CallRunner,
        saves: Saves,
        loads: Loads,
        *,
        not_finite: Callable[[], str],
    ) -> None:
        self._folder, self._engine, self._calls = folder, engine, calls
        self._saves, self._loads, self._not_finite = saves, loads, not_finite
        self._loop, self._done, self._count = 0, 0, 0
        self.resumed: SavedPlace | None = None  # where the state was saved or left with which this trainer began
        self._is_inside = False  # whether the body that was running had not ended
        self._is_closed = False
        self._rows_before: int | None = None  # of the history, when the body of the loop began; None outside of it
        self._trained = 0  # how many calls of `train` this body has made
        self._begins = False  # whether the next call is the first one of a loop that no checkpoint continues
        self._exit_epoch = 0  # the epoch in which a loop was left, after it had trained
        every = "epoch" if folder is None else folder.settings.every
        self._schedule = Schedule(every, time.monotonic, at=time.monotonic())
        self._saves_within = False  # the running call
        self._within: WithinCall | None = None  # the part of a call that is running
        self._asked: AnyTransfer | None = None  # by workers in that part
        self._handle: SaveHandle | None = None  # of the newest save within a call
        self._resumes_call = False  # whether the next call continues the one in which the checkpoint was made

    @property
    def epochs(self) -> int | None:
        """How many epochs the loop has whose body is running."""
        return None if self._rows_before is None else self._count

    @property
    def _step(self) -> int:
        """How many batches have been trained."""
        return self._engine.calls.progress.step

    def begin(self, load: Callable[[str], None]) -> None:
        """Take the folder. Continue where another script has left the workers, or load the newest
        checkpoint, if that is wanted."""
        folder, place = self._folder, self._calls.place
        if folder is not None:
            folder.claim()
        if self._calls.attached:
            self.resumed, self._is_inside = SavedPlace(place.loop, place.done, self._step), True
        elif folder is not None and folder.resumes:
            self._resume(folder, load)

    def _resume(self, folder: CheckpointFolder, load: Callable[[str], None]) -> None:
        """Load the newest checkpoint that is not damaged, if there is any."""
        tried = ""
        for place in folder.newest_first():
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
            return self._continue_from(place, path, folder.record(place))
        if tried:
            raise CheckpointError(
                f"all checkpoints in {folder} are damaged: to start from the beginning, pass another path"
            )
        logger.warning("training starts from the beginning: there is no checkpoint in %s", folder)

    def _continue_from(self, place: SavedPlace, path: str, record: Mapping[str, Any]) -> None:
        """Continue where the script was when the checkpoint with this record was made."""
        self.resumed, self._schedule.step = place, place.step
        done = counted(place.done, "epoch"), counted(place.step, "batch", "batches")
        logger.warning("training resumes from %s, after %s and %s in all", path, *done)
        self._is_inside = record.get("made") is not None
        if not record.get("finite", True):
            logger.warning(NOT_FINITE, path)
        if (measured := measured_in(record)) is not None:
            self._resumes_call = True
            self._engine.calls.continue_call(PartialResults((Ok(measured, Progress(step=place.step)),), EARLIER))
        self._calls.resume(record["history"], record.get("wants") or ())
        self._calls.place.resume(place.loop, place.done, record.get("made") or ())

    def refuse_load(self, call: str) -> None:
        """Raise an error for a load that would replace the state with which the trainer has
        resumed."""
        if self.resumed is None or self.resumed.loop == 0 or self._loop > 0:
            return
        if self._calls.attached:
            raise ConfigError(
                f"the trainer has taken over the workers of the last script, and {call} would replace their state: call it only "
                "if there was none. Write `if not trainer.attached:` before it"
            )
        assert self._folder is not None
        raise ConfigError(
            f"the trainer has resumed from {self._folder.path(self.resumed)}, and {call} would replace that: call it only "
            "if trainer.resumed_from is None"
        )

    def note_load(self) -> None:
        """Count the batches to the next checkpoint from a loaded state on."""
        self._schedule.step = self._step

    def note_change(self, call: str) -> None:
        """Warn of a change of the state between two loops that an earlier script has made there."""
        saved = self.resumed
        if saved is not None and self._rows_before is None and 0 < self._loop < saved.loop:
            logger.warning(
                "%s is called after loop %d over trainer.epochs(), but training was in loop %d when the script ended. A restarted "
                "script runs the code between loops again, so this changes the state a second time. Make the change in the body of a "
                "loop, or only if trainer.resumed_from is None",
                call,
                self._loop,
                saved.loop,
            )

    # -- the loop -------------------------------------------------------------------------------------

    def run(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs of this loop that are not done yet, from 1 to `count`."""
        self._loop += 1
        self._rows_before, self._count = None, count
        number, saved = self._loop, self.resumed
        done = 0 if saved is None or number > saved.loop else saved.done if number == saved.loop else count
        if done and number == (saved.loop if saved else 0) and not self._is_inside and self._calls.take_stop():
            return  # it was ended by a callback, and the script was killed afterwards
        if saved is not None and number < saved.loop:
            logger.warning(NO_EPOCHS, number, saved.loop)
        elif done >= count > 0 and not self._is_inside:
            logger.warning(ALL_DONE, count)
        self._begins, self._exit_epoch = saved is None or number > saved.loop, 0
        for epoch in range(done + 1, count + 1):
            self._done, self._trained = epoch - 1, 0
            self._rows_before = len(self._calls.history) - self._calls.begin_body(number, epoch - 1)
            try:
                yield epoch
                rows_before = self._rows_before
                if rows_before is None or number != self._loop:
                    raise ConfigError(
                        "a loop over trainer.epochs() must not begin inside another one: end the first one"
                    )
            except GeneratorExit:  # by `break`, or an error: that is known when the trainer ends
                self._exit_epoch = epoch if number == self._loop and self._trained else self._exit_epoch
                raise
            finally:
                if number == self._loop:
                    self._rows_before = None
            self._done = epoch
            script = {"made": None, "wants": self._calls.wants}
            stops = self._calls.take_stop()
            self._after_body(rows_before, script, last=stops or epoch == count)
            if stops:
                break
        if self._folder is not None:
            self._folder.wait()

    def _after_body(self, rows_before: int, script: dict[str, Any], *, last: bool) -> None:
        folder = self._folder
        if folder is None:
            return
        score = self._score(rows_before, folder.settings.best)
        self.end_part()
        step = self._step
        if last or folder.settings.every == "epoch" or self._schedule.is_due(step) or folder.improves(score):
            finite = all(map(is_finite, [*self._calls.history[rows_before:], {"loss": score}]))
            if finite and (parameter := self._not_finite()):
                logger.warning(WEIGHTS_NOT_FINITE, parameter)
                finite = False
            place = self._place_at(step)
            save = partial(folder.save, place, score, self._calls.history, self._start_save, script, finite=finite)
            save()
            if last:
                folder.wait()
                if place != folder.latest:  # a worker has failed, and no later save makes up for it
                    save()
            self._schedule.note_save(step)

    @exclusive
    def _start_save(self, path: str) -> Callable[[], Any]:
        """Copy the state. Return a function that returns when the file is complete."""
        handle = self._saves.save(path, blocking=False, watched=True)
        assert isinstance(handle, SaveHandle)
        self._loads.saves(path)
        return handle.result

    def _score(self, rows_before: int, name: str | None) -> float | None:
        """Find the newest value of a metric that was measured in this body. Raise an error if a
        validation did not measure it."""
        is_of_test = name is not None and name.startswith("test_")  # or else a test does not choose the model
        rows = [row for row in self._calls.history[rows_before:] if is_of_test or row["kind"] != "test"]
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))] if name is not None else []
        if values or name is None:
            return float(values[-1]) if values else None
        if any(row["kind"] == "validate" for row in rows):
            measured = {each for row in rows for each, value in row.items() if isinstance(value, (int, float))}
            raise unmeasured(f"AutoCheckpoint(best={name!r})", name, measured)
        return None

    def _place_at(self, step: int) -> SavedPlace:
        return SavedPlace(self._loop, self._done, step)

    def close(self, *, force: bool) -> None:
        """Wait for a save that is running, unless by force, and log its error. Let other trainers
        use the folder. A second call does nothing."""
        if self._folder is None or self._is_closed:
            return
        self._is_closed = True
        self.end_part()
        try:
            if not force:
                self._folder.wait()
                self._warn_of_missing(self._folder)
        except CheckpointError as error:
            logger.error("%s", error)
        finally:
            self._folder.release()

    def _warn_of_missing(self, folder: CheckpointFolder) -> None:
        """Warn of checkpoints that the user may miss, after loops that no error has ended."""
        if self._exit_epoch:
            logger.warning(LEFT, self._exit_epoch, folder.path(folder.latest) or "none")
        if folder.settings.best is not None and self._loop and self._done and folder.best is None:
            logger.warning(NEVER_MEASURED, folder.settings.best)

    # -- within a call of `train` -----------------------------------------------------------------------

    def begin_call(self, num_steps: int | None) -> dict[str, Any]:
        """Note a call of `train`, and return further arguments of the workers' call. Checkpoints
        are made within the first one of a body: a restarted script repeats the body, and its first
        call continues that one."""
        inside = self._rows_before is not None
        if not inside and self._folder is not None:
            raise ConfigError(
                "with checkpoints=AutoCheckpoint(...), train() must be called in a loop over trainer.epochs(n), which makes "
                "the checkpoints: write `for epoch in trainer.epochs(10):`, or call trainer.fit(10)"
            )
        self._trained += 1
        self._saves_within = self._schedule.every != "epoch" and self._trained == 1 and num_steps is None
        continues, self._resumes_call = self._resumes_call, False
        begins, self._begins = self._begins and inside, False
        return {"epochs": self.epochs, "continues": continues, "begins": begins}

    def end_call(self) -> None:
        """Note that a call of `train` has ended, as the records of checkpoints say from now on:
        they would be wrong within it, if it is made again."""
        self._saves_within = False

    @property
    def call(self) -> tuple[int, int, int]:
        """A key of the newest call of `train`."""
        return self._loop, self._done, self._trained

    def begin_part(self, call: tuple[int, int, int]) -> dict[str, Any]:
        """Make further arguments of the workers' call with this key, whenever it is made. Within an
        earlier one, which is made again, the script has no place to which a checkpoint belongs."""
        self.end_part()
        if not self._saves_within or call != self.call:
            return {}
        engine = self._engine
        before = [part.values for part in engine.calls.measured]
        step, ranks = engine.calls.progress.step, engine.world_size
        self._within = WithinCall(
            self._schedule, self._start_within, engine.cancel, step=step, ranks=ranks, before=before
        )
        if self._asked is not None:
            self._asked.close()
        self._asked = engine.group.transfer()
        self._asked.answer = self._within.answer
        return {"asks": {"transfer": self._asked.name, "step": self._within.first}}

    def end_part(self) -> None:
        """Note that no worker makes a checkpoint until the call is made again."""
        within, self._within = self._within, None
        if within is not None:
            within.end()
        if self._handle is not None:
            self._handle.end_unopened()

    def is_answering(self) -> bool:
        """Whether the ranks wait for the script, which begins a checkpoint within the call."""
        within = self._within
        return within is not None and within.is_answering()

    def _start_within(self, contents: Contents) -> Mapping[str, Any] | None:
        """Begin a checkpoint within the call. Return the arguments of the workers' save, or None if
        the one before is not written yet."""
        folder, arguments = self._folder, dict[str, Any]()
        assert folder is not None
        if folder.is_saving():
            return None

        def start(path: str) -> Callable[[], Any]:
            more, self._handle = self._saves.hand_out(path)
            arguments.update(more)
            return self._handle.result

        folder.save(
            self._place_at(contents.progress.step),
            None,
            self._calls.history,
            start,
            {"made": self._calls.place.as_json(), "wants": self._calls.wants},
            measured=lambda: contents.wait().call,
            written=lambda path: self._loads.saves(path, contents),
            fail=self._engine.cancel,
        )
        return arguments

"""Runs a trainer's measuring calls: merges what the ranks measured, and calls the callbacks.
Driver."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from raysgd.callbacks.base import Callback, CallResult, Kind, Run, Underway
from raysgd.callbacks.callback_list import CallbackList
from raysgd.callbacks.history import History
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.progress_bar import ProgressBar
from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures import metrics
from raysgd.core.measures.progress import Progress
from raysgd.core.measures.speed import SpeedWatch
from raysgd.engine.call import Job, PartialResults
from raysgd.engine.engine import Engine
from raysgd.engine.worker_info import WorkerInfo
from raysgd.errors import check_arguments, counted
from raysgd.trainer.loads import DrawnAnew
from raysgd.trainer.rows import RowsCheck
from raysgd.trainer.script_place import Made, ScriptPlace, storable
from raysgd.workers.tracebacks import fold_frames

logger = logging.getLogger("raysgd")

F = TypeVar("F", bound=Callable[..., Any])
LACKS_SAMPLES = (
    "the result of this call lacks num_samples: it does not count the data set's samples, and the workers have changed before all had "
    "reported theirs. Read it with result.get('num_samples'), or leave it out of what you return, so that raysgd counts samples"
)


def exclusive(method: F) -> F:
    """Let only one thread at a time call the trainer's methods with this decorator. Other threads
    get a TrainerBusyError."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._engine.claim(f"{method.__name__}()"):
                check_arguments(method, self, *args, **kwargs)
                return method(self, *args, **kwargs)
        except BaseException as error:
            fold_frames(error)
            raise

    return cast(F, call)


class CallRunner:
    """Owns a trainer's callbacks, the first of which is its history."""

    attached = False  # whether the workers are those of a script that has ended

    def __init__(self, callbacks: Sequence[Callback], run: Run, *, bar: bool = False, seed: int | None = None) -> None:
        self.drawn_anew = DrawnAnew(seed)
        self.stop = False  # whether the user's code on the workers wants the loop over epochs to end
        self.batch_mode = ""  # what the workers have decided about the batch
        self.speeds = SpeedWatch()
        self.history, self.run = History(), replace(run, speed=self.speeds.now)
        self._callbacks = CallbackList([self.history, *callbacks, *([ProgressBar()] if bar else [])])
        self._rows = RowsCheck()
        self._kind: Kind | None = None
        self._size = 0  # how many workers there are
        self._failed = False
        self._open = self._is_new_folder = False
        self.place = ScriptPlace()
        # The number of the newest evaluation of each kind, and where it has ended, by rank; None if only the ranks know.
        self.evaluated: dict[str, tuple[int, Any]] = dict.fromkeys(("validate", "test"), (0, None))

    @property
    def shows_results(self) -> bool:
        """Whether a callback prints or draws each result."""
        return self._callbacks.has(PrintCallback, ProgressBar)

    def resume(self, rows: Sequence[Mapping[str, Any]], wanted: Sequence[bool]) -> None:
        self._callbacks.resume(rows, wanted)
        self._callbacks.raise_stop()

    @property
    def wants(self) -> list[bool]:
        """Which callbacks want the loop over epochs to end."""
        return self._callbacks.wants

    def take_stop(self) -> bool:
        """Whether a callback wants the loop over epochs to end, once."""
        return self._callbacks.take_stop()

    def warn_of_plain_loop(self) -> None:
        """Warn of a call of `train` that no loop over `epochs()` makes, if one would act
        differently."""
        self._callbacks.warn_of_plain_loop()

    # -- the engine's listeners -----------------------------------------------------------------------

    def on_progress(self, info: WorkerInfo) -> None:
        partial = info.partial or metrics.Measured()
        if info.rank == 0:
            self.batch_mode = partial.batch_mode or self.batch_mode
        if self._kind is not None:
            if info.partial is not None and info.rank is not None:
                for warning in self._rows.see(info.worker, info.rank, info.partial):
                    logger.warning("%s", warning)
            if partial.pace is not None and info.rank is not None:
                gpus = [number for _, number in info.gpus]
                if line := self.speeds.see(info.rank, self._size, partial.pace, node=info.machine, gpus=gpus):
                    logger.warning("%s", line)
            now = Underway(
                kind=self._kind,
                worker=info.worker,
                progress=info.progress,
                metrics=partial.metrics,
                world_size=self._size,
            )
            self._callbacks.progress(now)
            self._callbacks.raise_stop()

    def on_recovery(self, recovery: Recovery) -> None:
        """Call the callbacks. One that stops training because of the recovery does so at the next
        progress message or at the end of the call, because the workers are between two generations
        now."""
        self._size = recovery.world_size_after
        self.speeds.changed()
        if recovery.reason != "batch":  # the same workers make a step again
            self.drawn_anew.note("the workers or the script have changed")
        if self._kind == "train":
            self.drawn_anew.say()
        self._callbacks.recovery(recovery)

    def on_wait(self, what: str) -> None:
        self._callbacks.wait(what)

    # -- the trainer's calls --------------------------------------------------------------------------

    def start(self, engine: Engine) -> None:
        self._open, self._is_new_folder = True, not self.run.folder.exists()
        self.run = replace(self.run, processes=engine.processes)
        try:
            self._callbacks.start(self.run)
            self._callbacks.raise_stop()
            self._say_folder()
            self._start(engine)
        except BaseException as error:
            self._fail(error)
            engine.stop(force=True)
            self.end()
            fold_frames(error)
            raise

    def _start(self, engine: Engine) -> None:
        engine.start()

    def begun(self, stop: Callable[..., None]) -> None:
        """Called when the trainer, which this method shuts down, can be used."""

    def begin_body(self, loop: int, done: int) -> int:
        """Note that the body of a loop begins: see `ScriptPlace`."""
        return self.place.begin_body(loop, done)

    def measure(self, engine: Engine, kind: Kind, job: Job) -> tuple[dict[str, Any], list[Any]]:
        """Run the job. Return one dict for all workers, and a list with each worker's own results,
        generation by generation: dicts, or the objects that the operator returned in place of
        them."""
        steps = job.call.arguments.get("num_steps")
        call = f"{kind}({'' if steps is None else f'num_steps={steps}'})"
        if (record := self.place.find_recorded(call)) is not None:
            self.stop = record.stop
            self._note_places(kind, record.places)
            return record.result, record.each
        self._store(caught=True)
        began, self._kind, self._failed, before = time.monotonic(), kind, False, engine.calls.progress.step
        self._size = engine.world_size
        self._rows.begin()
        if kind == "train":
            self.drawn_anew.say()
        try:
            self._callbacks.progress(Underway(kind=kind, worker="", progress=Progress(phase=kind)))
            self._callbacks.raise_stop()
            parts = engine.calls.run(job)
            for part in parts:
                self.batch_mode = (part.values and part.values[0].batch_mode) or self.batch_mode
            self.stop = any(value.stop for part in parts for value in part.values)
            self._note_places(kind, [value.place for value in parts[-1].values])
            result = _merged([part.values for part in parts])
            if kind == "train" and not result.get(BATCH_COUNT):  # a user's own loop does not count them
                result[BATCH_COUNT] = engine.calls.progress.step - before
            rows = [_plain(value) for value in _by_worker(parts)]
            self._kind = None
            result |= self._callbacks.result(self._result(engine, kind, result, rows, parts, time.monotonic() - began))
            self._callbacks.raise_stop()
            self._say_folder()
            each = _returned(kind, parts) or rows
            self.place.note(Made(call, result, each, self.stop, self.evaluated.get(kind, (0, None))[1]))
            self._store()
        except BaseException as error:
            self.place.note_error(call, error)
            self._fail(error)
            raise
        finally:
            self._kind = None
        return result, each

    def change(self, call: str, engine: Engine, make: Callable[[], Sequence[Any]]) -> list[Any]:
        """Make a call that changes the state, and return its values, by rank. In a body that an
        earlier script has not ended, do not make it again."""
        if (record := self.place.find_recorded(call, change=True)) is not None:
            if record.result is None:
                logger.warning(
                    "%s was made by the last script, and its values are not known. It returns None here", call
                )
            return [None] * engine.world_size if record.result is None else list(record.result)
        self._store(caught=True)
        try:
            values = list(make())
        except Exception as error:
            self.place.note_error(call, error)
            raise
        self.place.note(Made(call, storable(values)))
        self._store()
        return values

    def _note_places(self, kind: Kind, places: Any) -> None:
        if kind in self.evaluated:
            self.evaluated[kind] = self.evaluated[kind][0] + 1, places

    def _store(self, *, caught: bool = False) -> None:
        """Called with each call that has returned, and before the next one, if the script may have
        `caught` an error since."""

    def end(self) -> None:
        """Call the callbacks after the workers have ended. A second call does nothing."""
        if self._open:
            self._open = False
            self._callbacks.end(failed=self._failed)

    def note_exit(self, error: BaseException | None) -> None:
        """Note that the script or the trainer's `with` block has ended, and whether an error ended
        it."""
        self._failed = self._failed or error is not None

    def _say_folder(self) -> None:
        """Say, once, where callbacks have begun to write."""
        if self._is_new_folder and self.run.folder.exists():
            self._is_new_folder = False
            logger.warning("callbacks write to %s", self.run.folder)

    def describe(self, engine: Engine) -> str:
        state = {None: "idle", "train": "training", "validate": "validating", "test": "testing"}.get(self._kind) or str(
            self._kind
        )
        state = state if engine.calls.active else "shut down"
        workers, target = engine.world_size, engine.target
        short = engine.calls.active and workers and workers != target
        size = f"{workers} of {counted(target, 'worker')}" if short else counted(workers or target, "worker")
        return f"{self.run.trainer}({self.run.name}, {size}, epoch {engine.calls.progress.epoch}, {state})"

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        self._callbacks.error(error)

    def _result(
        self,
        engine: Engine,
        kind: Kind,
        result: dict[str, Any],
        rows: list[dict[str, Any]],
        parts: list[PartialResults],
        took: float,
    ) -> CallResult:
        return CallResult(
            kind=kind,
            epoch=engine.calls.progress.epoch,
            step=engine.calls.progress.step,
            metrics=_plain(result),
            by_worker=rows,
            world_size=engine.world_size,
            seconds=took,
            traces=[dict(value.traces) for part in parts for value in part.values],
        )


def _plain(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metrics.plain(each) for name, each in result.items()}


def _merged(parts: list[Any]) -> dict[str, Any]:
    """Merge the results of all workers, and say so if a part of `num_samples` is lacking."""
    result = metrics.merge_call(parts)
    if NUM_SAMPLES not in result and any(NUM_SAMPLES in value.metrics for part in parts for value in part):
        logger.warning(LACKS_SAMPLES)
    return result


def _by_worker(parts: Sequence[PartialResults]) -> list[dict[str, Any]]:
    """Each worker's own results, generation by generation. Parts between which the same workers
    only stopped, and no change was made, are one."""
    rows: list[dict[str, Any]] = []
    for _, group in itertools.groupby(parts, key=lambda part: part.generation):
        values = [part.values for part in group]
        if len({len(each) for each in values}) == 1:
            by_worker = [*zip(*values, strict=True)]
        else:  # some ranks failed before they measured anything
            by_worker = [(value,) for each in values for value in each]
        rows += [metrics.merge_measured([[value] for value in series]).metrics for series in by_worker]
    return rows


def _returned(kind: Kind, parts: Sequence[PartialResults]) -> list[Any]:
    """The objects that operators returned in place of dicts. Warn if they cannot contain all of the
    call."""
    values = list(itertools.chain.from_iterable(part.values for part in parts))
    objects = [each for value in values for each in value.returned]
    if objects and len(objects) < len(values):
        logger.warning(
            "the workers changed during %s(), so the objects that it returns lack the batches before that. These batches are not "
            "repeated. If all batches must count, return a dict, which raysgd merges",
            kind,
        )
    return objects

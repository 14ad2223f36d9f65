"""Call several callbacks. An error in one of them is logged, unless that callback may stop
training. Driver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.callbacks.history import History
from raysgd.core.decisions.policy import Recovery
from raysgd.errors import ConfigError, described

logger = logging.getLogger("raysgd")

# The key of what callbacks raised, in results and in the history.
CALLBACK_ERRORS = "callback_errors"
NO_LOOP = (
    "%s wants training to stop, but raysgd can stop only a loop over trainer.epochs(n) and fit(n), and not other calls of train(). "
    "Write `for epoch in trainer.epochs(10):`, or end your loop if the callback's wants_stop is True"
)
IN_FUNCTION = (
    "%s wants training to stop, but raysgd cannot stop the loop of a training function, which continues. Let the function end its loop, or "
    "raise an error in the callback, with stops_training = True in its class"
)


class CallbackList:
    """Owns the callbacks of one trainer, in order, and the error of one that wants training to
    stop.

    `raise_stop` raises that error later, at a point where the call can end.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._all = list(callbacks)
        self._failures: Counter[str] = Counter()
        self._since: dict[str, str] = {}
        self._stop: Exception | None = None
        self._warned_of_loop = False

    def has(self, *kinds: type[Callback]) -> bool:
        return any(isinstance(callback, kinds) for callback in self._all)

    def start(self, run: Run) -> None:
        self._call("on_start", run)

    def resume(self, rows: Sequence[Mapping[str, Any]], wanted: Sequence[bool]) -> None:
        """Let the callbacks see the rows of an earlier script, in which these have wanted the loop
        to end. One that has wanted that before, or does not want it with its present settings, does
        not."""
        self._call("on_resume", rows)
        for callback, was in zip(self._all, wanted, strict=True) if len(wanted) == len(self._all) else ():
            sees_rows = type(callback).on_resume is not Callback.on_resume
            callback.wants_stop = was and (callback.wants_stop or not sees_rows)

    @property
    def wants(self) -> list[bool]:
        """Which callbacks want the loop over epochs to end."""
        return [bool(callback.wants_stop) for callback in self._all]

    def warn_of_plain_loop(self, line: str = NO_LOOP) -> None:
        """Warn, once, of callbacks that want the loop to end, because no loop over epochs runs."""
        wanting = [type(each).__name__ for each in self._all if each.wants_stop]
        if wanting and not self._warned_of_loop:
            self._warned_of_loop = True
            logger.warning(line, " and ".join(wanting))

    def take_stop(self) -> bool:
        """Whether a callback wants the loop over epochs to end. Each ends only one loop."""
        wanting = [callback for callback in self._all if callback.wants_stop]
        for callback in wanting:
            callback.wants_stop, why = False, f": {callback.stop_reason}" if callback.stop_reason else ""
            logger.warning("%s ends the loop over epochs%s", type(callback).__name__, why)
        return bool(wanting)

    def progress(self, now: Underway) -> None:
        self._call("on_progress", now)

    def result(self, result: CallResult) -> dict[str, Any]:
        """Call the callbacks with the result and with the metrics that they add to it. Return these
        metrics, and what the callbacks have raised since the last result."""
        extra: dict[str, Any] = {}
        self._call("extra_metrics", result, into=extra)
        self._call("on_result", replace(result, metrics={**result.metrics, **extra}))
        if result.kind == "report":
            self.warn_of_plain_loop(IN_FUNCTION)
        return {**extra, **self._note_failures()}

    def wait(self, what: str) -> None:
        self._call("on_wait", what)

    def recovery(self, recovery: Recovery) -> None:
        self._call("on_recovery", recovery)

    def error(self, error: BaseException) -> None:
        """Report the error that the caller gets, which precedes an error of a callback."""
        self._call("on_error", error)
        self._forget_stop()

    def end(self, *, failed: bool) -> None:
        """Report the end, after which no callback can stop training."""
        self._call("on_end", failed)
        self._note_failures()
        self._forget_stop()
        for name, count in self._failures.items():
            if count > 1:
                logger.error("%s raised %d errors; the first one was logged above", name, count)
        self._failures.clear()

    def _note_failures(self) -> dict[str, Any]:
        """Add to the history which callbacks have failed since the last call of this method, with
        the first error of each. Return what was added."""
        since, self._since = self._since, {}
        errors = {CALLBACK_ERRORS: [f"{name}: {error}" for name, error in since.items()]} if since else {}
        for callback in self._all:
            if isinstance(callback, History):
                callback.note(errors)
        return errors

    def raise_stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            raise stop

    def _call(self, hook: str, argument: Any, *, into: dict[str, Any] | None = None) -> None:
        """Call one method of the callbacks; `into` is a dictionary for what they return."""
        for callback in self._all:
            try:
                returned = getattr(callback, hook)(argument)
                if into is not None:
                    into.update(returned)
            except Exception as error:
                self._failed(callback, hook, error)

    def _forget_stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            logger.error("a callback with stops_training raised an error when no call was left to stop", exc_info=stop)

    def _failed(self, callback: Callback, hook: str, error: Exception) -> None:
        if callback.stops_training and self._stop is None:
            self._stop = error
            return
        name = f"{type(callback).__name__}.{hook}"
        self._failures[name] += 1
        self._since.setdefault(name, described(error))
        if self._failures[name] == 1:
            trace = error.__traceback__
            without_ours = error.with_traceback(trace.tb_next or trace) if trace is not None else error
            logger.error("the callback %s raised an error; training continues", name, exc_info=without_ours)


def check_callbacks(callbacks: Any, adapt: Callable[[Any], Any] = lambda each: each) -> list[Callback]:
    """Check a trainer's argument `callbacks`, and make it a list. `adapt` may convert objects that
    are not callbacks. Raise `ConfigError` for anything that is not a callback then."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):  # a History is a sequence too
        raise ConfigError(f"callbacks must be a list of raysgd.callbacks.Callback objects, got {callbacks!r}")
    result = []
    for each in callbacks:
        if isinstance(each, type):
            raise ConfigError(f"callbacks must be objects, got the class {each.__name__}: pass {each.__name__}()")
        callback = adapt(each)
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks must be raysgd.callbacks.Callback objects (or TrainingCallback, as in v1), got {each!r}"
            )
        result.append(callback)
    return result


def wanted_on_workers(callbacks: Iterable[Callback]) -> list[Any]:
    """Collect what these callbacks want of the workers."""
    return [callback.on_workers for callback in callbacks if callback.on_workers is not None]

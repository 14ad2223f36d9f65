"""Hosts a training function in one worker: runs it, stops it when a peer is lost, keeps what it committed."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from raysgd.core.outcomes import DataLoaderFailure, Interrupted
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.train.elastic_state import Committed
from raysgd.train.run_session import Attempt, Session, Stopped, running

__all__ = ["FunctionReplica", "FunctionReplicaFactory"]

WAKE = getattr(signal, "SIGUSR2", None)
KNOCK_S = 0.05


def _importing(frame: FrameType | None) -> bool:
    """A module that is stopped half-way stays broken for the whole process."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _as_it_is(values: dict[str, Any]) -> dict[str, Any]:
    return values


@dataclass(frozen=True)
class FunctionReplicaFactory:
    """Makes a replica in a worker; picklable. `make` makes the object that `execute` works on, if there is one."""

    dumps: Callable[[Any], bytes] = pickle.dumps
    encode: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    make: Callable[[], Any] | None = None

    def __call__(self, rank_info: RankInfo, control: Control) -> FunctionReplica:
        return FunctionReplica(rank_info, control, self)


class FunctionReplica:
    """Owns the user's object, the last commit, and how many points it has passed so far (checkpoints and commits).

    A point is where the function can go on with other members. Points are the steps of the engine's borders.
    """

    def __init__(self, rank_info: RankInfo, control: Control, factory: FunctionReplicaFactory) -> None:
        self._rank_info, self._control, self._factory = rank_info, control, factory
        self.instance = factory.make() if factory.make is not None else None
        self._kept = Committed()
        self._run_number = -1
        self._points = 0
        self._stoppable = False
        self._main = threading.get_ident()
        if WAKE is not None and threading.current_thread() is threading.main_thread():
            signal.signal(WAKE, self._on_wake)
            control.on_interrupt = self._wake

    @property
    def progress(self) -> Progress:
        return Progress(step=self._points, batches=self._points, phase=self._control.phase)

    def run(self, call: Call) -> Any:
        self._control.phase = call.name
        try:
            return call.method(self, **call.arguments)
        finally:
            self._control.phase = "idle"

    # -- calls ----------------------------------------------------------------------------------------

    def function(self, task: Any, attempt: Attempt, checkpoint: Any, **engines: Any) -> Any:
        """The trainer's `run`. What the function returns is pickled here, where an error about it is the user's."""
        if attempt.run != self._run_number:
            self._run_number = attempt.run
            self._kept.forget()
        session = Session(
            self._rank_info,
            self._control,
            replace(attempt, checkpoint=None if checkpoint is None else bytes(checkpoint.data)),
            dumps=self._factory.dumps,
            encode=self._factory.encode,
            passed=self._passed,
            kept=self._kept,
        )
        self._control.begun = self._points + 1
        try:
            with running(session):
                return self._factory.dumps(self._call(*task))
        except Stopped as stop:
            return Interrupted(None, "the function was stopped", self.progress, asked=stop.asked)
        except DataLoaderFailure as failure:
            return failure.interrupted("the function's data loader", None, self.progress)
        except KeyboardInterrupt:
            if not self._control.interrupted:
                raise
            return Interrupted(None, "the function was stopped in a call of Ray's", self.progress)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """With the door open for `_on_wake`, which closes it behind itself: no second stop hits the clean-up."""
        self._stoppable = True
        try:
            if self._control.interrupted:
                raise Stopped(asked=False)
            return function(*arguments)
        finally:
            self._stoppable = False

    def apply(self, function: Callable[[], Any], only: int | None = None) -> Any:
        """On every rank, or on one."""
        return function() if only is None or only == self._rank_info.world_rank else None

    def apply_object(self, function: Callable[[Any], Any], only: int | None = None) -> Any:
        return function(self.instance) if only is None or only == self._rank_info.world_rank else None

    def method(self, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return getattr(self.instance, name)(*positional, **named)

    # -- stopping -------------------------------------------------------------------------------------

    def _passed(self) -> None:
        """A checkpoint is with the driver, or a commit is made: the function may stop here for a change of members."""
        self._points += 1
        # A stop in the middle of a message would leave half of it on the line. `begin` notices what came meanwhile.
        open_before, self._stoppable = self._stoppable, False
        self._control.report(self.progress)
        self._stoppable = open_before
        if not self._control.begin(self._points + 1):
            raise Stopped(asked=not self._control.interrupted)

    def _wake(self) -> None:
        """Listener thread: the generation is over. The main thread may be anywhere in the user's code."""
        threading.Thread(target=self._knock, name="raysgd-stop", daemon=True).start()

    def _knock(self) -> None:
        """Again and again, as the function may be where it cannot be stopped."""
        assert WAKE is not None
        while self._stoppable and self._control.interrupted:
            signal.pthread_kill(self._main, WAKE)
            time.sleep(KNOCK_S)

    def _on_wake(self, signum: int, frame: FrameType | None) -> None:
        """Main thread, between two steps of the interpreter; never outside the user's function."""
        if self._stoppable and self._control.interrupted and not _importing(frame):
            self._stoppable = False
            if frame is not None and str(frame.f_globals.get("__name__", "")).startswith("ray."):
                raise KeyboardInterrupt  # the only thing that gets out of a `ray.get`; all else it swallows, and waits on
            raise Stopped(asked=False)

    # -- membership -----------------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def partial(self) -> None:
        """A function's results are its reports, and these are with the driver."""

    def state(self) -> bytes:
        return self._factory.dumps((self._run_number, self._points, self._kept.content))

    def load(self, data: bytes) -> None:
        self._run_number, self._points, self._kept.content = pickle.loads(data)

    def close(self) -> None:
        """Lets go of the user's object; it may have a `shutdown` or `close` of its own in `__del__`."""
        self.instance = None
        self._control.on_interrupt = lambda: None

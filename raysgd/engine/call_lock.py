"""Let only one thread at a time call the workers; any other gets an error. Driver."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from raysgd.errors import TrainerBusyError


class CallLock:
    """Owns the claim of the running call. Never waits, because a second thread gets an error at
    once.

    The thread that has the claim may make more calls inside the first one (from a callback or a
    signal handler).
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def claim(self, call: str) -> Claim:
        """A context for the duration of `call`."""
        return Claim(self._claims, call)

    def held(self, *, here: bool) -> Claim | None:
        """The claim of another thread, if there is one; or this thread's, in which a callback or a
        signal handler is running then."""
        claim = self._claims.get("call")
        return claim if claim is not None and (claim.thread == threading.get_ident()) == here else None


@dataclass(eq=False)
class Claim:
    """One call of one thread, as a context manager. (`contextlib.contextmanager` would set
    attributes of the exceptions that pass through it, which some exception classes refuse.)"""

    held: dict[str, Claim]
    call: str
    thread: int = field(default_factory=threading.get_ident)
    name: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)

    def __enter__(self) -> None:
        # This is one atomic operation of the interpreter. A lock could block a signal handler forever.
        holder = self.held.setdefault("call", self)
        if holder.thread != self.thread:
            raise TrainerBusyError(
                f"{self.call} was called in thread {self.name!r} while {holder.describe()}. Workers carry out one call at "
                "a time, so only one thread at a time may use a trainer: wait until that call has returned, put a lock "
                "around the calls, or use one trainer per thread"
            )

    def __exit__(self, *error: object) -> None:
        if self.held.get("call") is self:
            del self.held["call"]

    def describe(self) -> str:
        """Say what is running, where, and for how long."""
        return f"{self.call} has been running for {time.monotonic() - self.since:.1f} s, called in thread {self.name!r}"

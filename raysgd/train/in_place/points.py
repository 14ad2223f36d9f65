"""The points that another Trainer logs: each once, although steps are repeated. Worker."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.train.replica import STOP_SIGNAL


@dataclass
class Committed:
    """The calls that a commit has, until they are made, and how many of those after it were made,
    because no other commit follows."""

    calls: deque[tuple[Any, ...]] = field(default_factory=deque)
    later: int = 0


class Points:
    """Calls of `log`, each of which waits for the next commit: a step that is repeated after a
    failure makes its calls again, and those of its first time are forgotten.

    They are a part of the commit. So another attempt makes those that this one does not come to.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._waiting = deque[tuple[Any, ...]]()
        self._repeated = 0  # calls to come that were made before
        self.committed = Committed()

    def add(self, *call: Any) -> None:
        self._waiting.append(call)

    def commit(self, keep: Callable[[], None]) -> None:
        """Let `keep` make a commit of what waits, and then make these calls."""
        self.committed, self._waiting = Committed(self._waiting), deque()
        keep()
        self._make(self.committed.calls)

    def resume(self, committed: Committed) -> None:
        """Continue from a commit. What waits was logged before it."""
        self._waiting.clear()
        self.committed, self._repeated = committed, committed.later
        self._make(committed.calls)

    def end(self) -> None:
        """Make the calls for which no commit follows."""
        while self._waiting and self._repeated:
            self._waiting.popleft()
            self._repeated -= 1
        self.committed.later += len(self._waiting)
        self._make(self._waiting)

    def _make(self, calls: deque[tuple[Any, ...]]) -> None:
        """Make calls, each once: a signal that stops the function waits meanwhile."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
        try:
            while calls:
                self._log(*calls.popleft())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

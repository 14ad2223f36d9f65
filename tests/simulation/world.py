"""Simulate time, and processes that can be killed, stopped and resumed at any moment.

Everything runs in one thread. The driver's code runs in the main greenlet and passes time by waiting for events; each
task of a simulated process is a greenlet of its own. One seeded random generator decides every delay and every order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Condition", "End", "Process", "Wake", "World"]


class End(KeyboardInterrupt, GreenletExit):
    """Ends a task. A worker's code never handles the first, and a greenlet ends silently with the second."""


class World:
    """Owns the virtual time and the actions that are scheduled in it. `task` and `current` are another kind of tasks than
    greenlets."""

    def __init__(
        self,
        seed: int,
        *,
        tracing: bool = False,
        task: Callable[..., Any] = greenlet,
        current: Callable[[], Any] = getcurrent,
    ) -> None:
        self._tracing, self._task, self.current = tracing, task, current
        self.random = random.Random(seed)
        self.now = 1000.0
        self._ahead_s = 0.0
        self._jumps: list[tuple[float, float]] = []  # when the driver's clock jumped, and how far ahead it was before
        self.hub = current()
        self.trace: list[str] = []
        self._queue: list[tuple[float, float, int, Callable[[], Any]]] = []
        self._count = 0
        self._tasks: list[Any] = []

    def spawn(self, run: Callable[[], Any]) -> Any:
        """Return a new task."""
        self._tasks.append(task := self._task(run, parent=self.hub))
        return task

    def close(self) -> None:
        """End all tasks. Those of processes that were killed wait forever, and would keep their memory."""
        for task in self._tasks:
            task.throw(End)

    def clock(self) -> float:
        """Return what the driver's clock shows. It is ahead of the virtual time after it has jumped."""
        return self.now + self._ahead_s

    def jump(self, seconds: float) -> None:
        """Let the driver's clock jump forward, as when its machine was suspended. (A monotonic clock never jumps
        back.)"""
        self._jumps.append((self.now, self._ahead_s))
        self._ahead_s += seconds

    def shown_at(self, when: float) -> float:
        """Return what the driver's clock showed at a virtual time in the past."""
        return when + next((ahead_s for jumped_at, ahead_s in self._jumps if when <= jumped_at), self._ahead_s)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def note(self, text: str, *values: Any) -> None:
        """Add a line to the trace, if there is one: `text` with its values, as in logging."""
        if self._tracing:
            self.trace.append(f"{self.now - 1000:9.4f}  {text % values}")

    def at(self, delay: float, do: Callable[[], Any]) -> None:
        """Run `do` after `delay` virtual seconds. Actions of the same moment run in random order."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self.random.random(), self._count, do))

    def run(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let time pass until `enough` returns True, or for this many seconds."""
        deadline, queue = self.now + seconds, self._queue
        while not enough():
            if not queue or queue[0][0] > deadline:
                self.now = max(self.now, deadline)
                return
            when, _, _, do = heapq.heappop(queue)
            if when > self.now:
                self.now = when
            do()


class Process:
    """A process, which runs nothing while it is stopped, and nothing after it has ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.stopped_at: float | None = None
        self.died_at: float | None = None
        self._held: list[Callable[[], Any]] = []

    def at(self, delay: float, do: Callable[[], Any]) -> None:
        self.world.at(delay, partial(self._run, do))

    def stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self.world.now

    def resume(self) -> None:
        self.stopped_at = None
        held, self._held = self._held, []
        for position, do in enumerate(held):
            self.at(position * 1e-6, do)

    def die(self) -> None:
        self.alive, self.died_at = False, self.world.now
        self._held = []

    def spawn(self, run: Callable[[], Any]) -> None:
        self.at(0.0, self.world.spawn(run).switch)

    def sleep(self, seconds: float) -> None:
        wake = Wake(self)
        self.at(seconds, wake)
        wake.wait()

    def _run(self, do: Callable[[], Any]) -> None:
        if not self.alive:
            return
        if self.stopped_at is not None:
            self._held.append(do)
        else:
            do()


class Wake:
    """One wait of the task that creates it. The first call ends the wait with a value, and later calls do nothing."""

    def __init__(self, process: Process) -> None:
        self._process, self._task = process, process.world.current()
        self.used = False

    def __call__(self, value: Any = None) -> None:
        if not self.used:
            self.used = True
            self._process.at(0.0, partial(self._task.switch, value))

    def wait(self) -> Any:
        return self._process.world.hub.switch()


class Condition:
    """A replacement for `threading.Condition` in the tasks of a simulated process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: list[Wake] = []

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because only one task runs at a time."""

    def wait(self, timeout: float) -> None:
        wake = Wake(self._process)
        self._waiting.append(wake)
        self._process.at(timeout, wake)
        wake.wait()
        self._waiting.remove(wake)

    def notify_all(self) -> None:
        for wake in self._waiting:
            wake()

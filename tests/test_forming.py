"""What the user reads if the workers start, but cannot form a process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.config import Limits
from raysgd.core.outcomes import Interrupted, Ok
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.engine.generation import Generation
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import WorkerStartError
from raysgd.workers.events import CallEnded, Event, WorkerStarted


class Unconnected:
    """A group without processes, whose workers start but cannot join a process group."""

    elastic = True

    def __init__(self) -> None:
        self.listener: Callable[[Event], None] = lambda event: None
        self._names, self._calls = itertools.count(1), itertools.count(1)
        self._events: list[Event] = []

    def launch(self, count: int) -> list[str]:
        workers = [f"w{next(self._names)}" for _ in range(count)]
        self._events += [WorkerStarted(each, "node", 1, f"10.0.0.{n}") for n, each in enumerate(workers, start=1)]
        return workers

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        call = next(self._calls)
        self._events.append(CallEnded(worker, call, Interrupted(cause="timed out") if verb == "join" else Ok()))
        return call

    def poll(self, timeout: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def room(self) -> int:
        return 2

    def silent_for(self, worker: str) -> float:
        return 0.0

    def send(self, worker: str, message: Any) -> bool:
        return True

    def dismiss(self, worker: str) -> None:
        """There is no process to end."""


def test_the_error_names_the_cause_of_each_rank_with_its_address() -> None:
    limits = Limits.derive(timeout_s=10, hang_timeout_s=10, start_s=10)
    group: Any = Unconnected()
    generation = Generation(WorkerTable(group), SingleWorkerBackend(), limits, factory=None, hook=None)
    with pytest.raises(WorkerStartError) as caught:
        generation.start(2, 2)
    assert "could not connect to each other (rank 0 on 10.0.0.1: timed out; rank 1 on 10.0.0.2: timed out)" in str(
        caught.value
    )

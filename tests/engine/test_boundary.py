"""Ranks agree on a batch boundary: tests choose their answers, without processes."""

from __future__ import annotations

import time
from typing import Any

from raysgd.core.channel.messages import BoundaryAnswer, ConfirmBoundary, Message, ProposeBoundary
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Ok
from raysgd.engine import boundary as module
from raysgd.engine.boundary import Boundary
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.events import CallEnded, Event, MessageReceived


class Ranks:
    """A group of two ranks without processes: it records messages, and a test sets the answers."""

    def __init__(self, *steps: int) -> None:
        self.told: list[tuple[str, Message]] = []
        self._events: list[Event] = []
        group: Any = self
        self.table = WorkerTable(group)
        for worker in self.table.launch(len(steps)):
            call = self.submit(worker, "run", {})
            self.table.expect(worker, call)
            self._events.append(CallEnded(worker, call, Ok(progress=Progress(step=steps[int(worker)]))))
        self.table.pump(0.0)

    def launch(self, count: int) -> list[str]:
        return [str(rank) for rank in range(count)]

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        return int(worker) + 1

    def send(self, worker: str, message: Message) -> bool:
        self.told.append((worker, message))
        return True

    def poll(self, timeout: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def say(self, worker: str, kept: bool, begun: int) -> None:
        self._events.append(MessageReceived(worker, BoundaryAnswer(self._newest.round, kept, begun)))
        self.table.pump(0.0)

    @property
    def _newest(self) -> ProposeBoundary:
        return [message for _, message in self.told if isinstance(message, ProposeBoundary)][-1]

    @property
    def proposed(self) -> int:
        return self._newest.step


def test_a_rank_that_has_begun_no_batch_does_not_move_the_boundary(monkeypatch: Any) -> None:
    """It always answers -1, while its peer is ready to stop: the boundary does not move."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    ranks = Ranks(5, 0)
    boundary = Boundary(ranks.table, {"0": 1, "1": 2}, lead=1)
    for _ in range(20):
        ranks.say("0", True, 6)
        ranks.say("1", False, -1)
        time.sleep(0.001)
        boundary.advance(["0", "1"])
    assert ranks.proposed == 7
    ranks.say("0", True, 6)
    ranks.say("1", True, 1)
    boundary.advance(["0", "1"])
    assert boundary.settled and [to for to, message in ranks.told if message == ConfirmBoundary()] == ["0", "1"]


def test_a_faster_rank_gets_a_proposal_further_ahead() -> None:
    ranks = Ranks(5, 5)
    boundary = Boundary(ranks.table, {"0": 1, "1": 2}, lead=1)
    assert ranks.proposed == 6
    ranks.say("0", False, 9)
    ranks.say("1", True, 6)
    boundary.advance(["0", "1"])
    assert ranks.proposed == 11 and not boundary.settled

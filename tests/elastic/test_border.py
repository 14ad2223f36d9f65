"""Agreeing on where to stop, with ranks that answer as they like: no processes here."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

from raysgd.core.messages import BoundaryAnswer, ConfirmBoundary, Message, ProposeBoundary
from raysgd.engine import border as module
from raysgd.engine.border import Border
from raysgd.progress import Progress


class Desk:
    """Stands for the crew: two ranks, what they were told, and what they say."""

    def __init__(self, *steps: int) -> None:
        self.clock, self.rounds = time.monotonic, itertools.count(1)
        self.members = {str(rank): SimpleNamespace(progress=Progress(step=step)) for rank, step in enumerate(steps)}
        self.answers: list[tuple[str, BoundaryAnswer]] = []
        self.told: list[tuple[str, Message]] = []
        self.group = SimpleNamespace(tell=lambda worker, message: self.told.append((worker, message)))

    def say(self, worker: str, kept: bool, begun: int) -> None:
        self.answers.append((worker, BoundaryAnswer(self._newest.round, kept, begun)))

    def take_answers(self, kind: type) -> list[tuple[str, BoundaryAnswer]]:
        taken, self.answers = self.answers, []
        return taken

    @property
    def _newest(self) -> ProposeBoundary:
        return [message for _, message in self.told if isinstance(message, ProposeBoundary)][-1]

    @property
    def proposed(self) -> int:
        return self._newest.step


def test_a_rank_that_has_begun_nothing_puts_no_border_out_of_reach(monkeypatch: Any) -> None:
    """It says -1 as often as it is asked, while its peer is ready to stop: the border stays where it is."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    desk: Any = Desk(5, 0)
    border = Border(desk, {"0": 1, "1": 2}, lead=1)
    for _ in range(20):
        desk.say("0", True, 6)
        desk.say("1", False, -1)
        time.sleep(0.001)
        border.advance(["0", "1"])
    assert desk.proposed == 7
    desk.say("0", True, 6)
    desk.say("1", True, 1)
    border.advance(["0", "1"])
    assert border.settled and [to for to, message in desk.told if message == ConfirmBoundary()] == ["0", "1"]


def test_a_rank_that_was_faster_is_met_further_ahead() -> None:
    desk: Any = Desk(5, 5)
    border = Border(desk, {"0": 1, "1": 2}, lead=1)
    assert desk.proposed == 6
    desk.say("0", False, 9)
    desk.say("1", True, 6)
    border.advance(["0", "1"])
    assert desk.proposed == 11 and not border.settled

"""Agreeing on where to stop, with ranks that answer as they like: no processes here."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

from raysgd.engine import boundary as module
from raysgd.engine.boundary import Boundary
from raysgd.progress import Progress
from raysgd.workers.events import Heard


class Desk:
    """Stands for the table: two ranks, what they were told, and what they say."""

    def __init__(self, *steps: int) -> None:
        self.clock, self.rounds = time.monotonic, itertools.count(1)
        self.members = {str(rank): SimpleNamespace(progress=Progress(step=step)) for rank, step in enumerate(steps)}
        self.answers: list[Heard] = []
        self.told: list[dict[str, Any]] = []
        self.group = SimpleNamespace(tell=lambda worker, message: self.told.append({**message, "to": worker}))

    def say(self, worker: str, kept: bool, begun: int) -> None:
        newest = max(each["id"] for each in self.told if each["t"] == "propose")
        self.answers.append(Heard(worker, {"t": "consent", "id": newest, "kept": kept, "begun": begun}))

    @property
    def proposed(self) -> int:
        return int([each["at"] for each in self.told if each["t"] == "propose"][-1])


def test_a_rank_that_has_begun_nothing_puts_no_border_out_of_reach(monkeypatch: Any) -> None:
    """It says -1 as often as it is asked, while its peer is ready to stop: the border stays where it is."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    desk: Any = Desk(5, 0)
    border = Boundary(desk, {"0": 1, "1": 2}, lead=1)
    for _ in range(20):
        desk.say("0", True, 6)
        desk.say("1", False, -1)
        time.sleep(0.001)
        border.advance(["0", "1"])
    assert desk.proposed == 7
    desk.say("0", True, 6)
    desk.say("1", True, 1)
    border.advance(["0", "1"])
    assert border.settled and [each["to"] for each in desk.told if each["t"] == "confirm"] == ["0", "1"]


def test_a_rank_that_was_faster_is_met_further_ahead() -> None:
    desk: Any = Desk(5, 5)
    border = Boundary(desk, {"0": 1, "1": 2}, lead=1)
    assert desk.proposed == 6
    desk.say("0", False, 9)
    desk.say("1", True, 6)
    border.advance(["0", "1"])
    assert desk.proposed == 11 and not border.settled

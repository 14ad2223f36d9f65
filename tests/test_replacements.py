"""Replacements on their way: who is late is doubted, somebody else is tried, and who comes first is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.config import Limits
from raysgd.core.outcomes import Ok
from raysgd.engine.replacements import OVERDUE_S, Replacements
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.events import CallEnded, Event, WorkerEnded, WorkerStarted

START_S = 100.0


class Places:
    """A group without processes: it notes what is asked of it, and tells what the test wants told."""

    elastic = True

    def __init__(self, room: int) -> None:
        self.listener: Callable[[Event], None] = lambda event: None
        self.free, self.dismissed = room, []
        self._names, self._calls = itertools.count(1), itertools.count(1)
        self.told: list[Event] = []

    def launch(self, count: int) -> list[str]:
        self.free -= count
        return [f"w{next(self._names)}" for _ in range(count)]

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        call = next(self._calls)
        self.told.append(CallEnded(worker, call, Ok()))  # set-up takes no time here
        return call

    def poll(self, timeout: float) -> list[Event]:
        told, self.told = self.told, []
        return told

    def dismiss(self, worker: str) -> None:
        self.dismissed.append(worker)

    def room(self) -> int:
        return self.free

    def silent_for(self, worker: str) -> float:
        return 0.0


class Scene:
    """A recruiter, its places, and a clock that the test moves."""

    def __init__(self, room: int) -> None:
        self.now = 1000.0
        self.places = Places(room)
        self.table = WorkerTable(self.places, clock=lambda: self.now)  # type: ignore[arg-type]
        limits = Limits(start_s=START_S, setup_s=60, join_s=60, collective_s=60, hang_s=60)
        self.replacements = Replacements(self.table, dict, limits=limits, in_place=True)

    def after(self, seconds: float, *events: Event) -> None:
        self.now += seconds
        self.places.told += events
        for _ in range(2):  # an arrival begins the set-up, whose end is told at the next look
            self.table.pump(0)
            self.replacements.tick()


@pytest.fixture
def scene() -> Scene:
    return Scene(room=2)


def test_who_is_late_is_doubted_while_there_is_room(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S - 1)
    assert scene.replacements.starting == 1
    scene.after(2)
    assert scene.replacements.starting == 0, "somebody else may be started for it"
    assert scene.places.dismissed == [], "but it may still come"


def test_without_room_for_another_there_is_only_waiting(scene: Scene) -> None:
    scene.replacements.launch(2)
    scene.after(OVERDUE_S + 1)
    assert scene.replacements.starting == 2


def test_the_second_is_taken_and_the_late_one_sent_home(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    scene.replacements.launch(1)
    scene.after(3, WorkerStarted("w2", "node", 1))
    assert scene.replacements.ready == 1
    assert scene.replacements.take(1) == ["w2"]
    assert scene.places.dismissed == ["w1"]


def test_a_late_one_that_comes_after_all_is_taken(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    scene.after(3, WorkerStarted("w1", "node", 1))
    assert scene.replacements.take(2) == ["w1"]


def test_it_is_kept_while_places_are_left(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    scene.replacements.launch(1)
    scene.after(3, WorkerStarted("w2", "node", 1))
    assert scene.replacements.take(2) == ["w2"]
    scene.after(3, WorkerStarted("w1", "node", 2))
    assert scene.replacements.take(1) == ["w1"]
    assert scene.places.dismissed == []


def test_nobody_is_waited_for_longer_than_the_limit(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.replacements.launch(1)
    scene.after(START_S + 1)
    assert scene.replacements.starting == 0
    assert scene.places.dismissed == ["w1"]
    assert "did not start within 100 s" in caplog.text


def test_the_second_one_is_doubted_later(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    scene.places.free = 2
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    assert scene.replacements.starting == 1, "it could just be a slow machine"
    scene.after(OVERDUE_S)
    assert scene.replacements.starting == 0


@pytest.mark.parametrize("late", [False, True])
def test_one_that_dies_on_its_way_is_dropped(scene: Scene, late: bool) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1 if late else 1)
    scene.after(1, WorkerEnded("w1", "killed"))
    assert scene.replacements.starting == 0
    assert scene.places.dismissed == ["w1"]


def test_dismissing_all_forgets_the_late_ones_too(scene: Scene) -> None:
    scene.replacements.launch(1)
    scene.after(OVERDUE_S + 1)
    scene.replacements.dismiss_all()
    assert scene.places.dismissed == ["w1"]

"""Points that a Trainer logs are each passed on once, wherever an attempt ends."""

import copy
import functools
import itertools
from typing import Any

import pytest

from raysgd.train.in_place.points import Points

STEPS, AFTERWARDS = 4, 2


class Stop(BaseException):
    pass


class Program:
    """Logs a point before each commit and two after the last one. An attempt stops at the places with these numbers, of all attempts."""

    def __init__(self, stops: tuple[int, ...]) -> None:
        self.stops, self.place = stops, 0
        self.kept: Any = None  # the last commit: the number of the step, and its points
        self.logged: list[int] = []

    def may_stop(self) -> None:
        self.place += 1
        if self.place in self.stops:
            raise Stop

    def keep(self, step: int, points: Points) -> None:
        self.may_stop()
        self.kept = step, points.committed
        self.may_stop()

    def attempt(self) -> None:
        points = Points(self.logged.append)
        points.add(-1)  # as hyperparameters, which each attempt logs before its first step
        first = 0
        if self.kept is not None:
            first, committed = self.kept
            points.resume(committed)
        for step in range(first, STEPS):
            if step > first or self.kept is None:
                points.commit(functools.partial(self.keep, step, points))
            self.may_stop()
            points.add(step)
            self.may_stop()
        for number in range(AFTERWARDS):
            points.add(STEPS + number)
            points.end()
            self.may_stop()


@pytest.mark.parametrize("stops", [0, 1, 2, 3])
def test_each_point_is_passed_on_once(stops: int) -> None:
    undisturbed = Program(())
    undisturbed.attempt()
    assert undisturbed.logged == [*range(-1, STEPS + AFTERWARDS)]
    for places in itertools.combinations(range(1, undisturbed.place + 4), stops):
        program = Program(places)
        for _ in range(stops + 1):
            try:
                program.attempt()
                break
            except Stop:
                continue
        assert program.logged == undisturbed.logged, places


def test_a_new_process_passes_on_what_a_commit_has() -> None:
    """It gets a copy of the commit."""
    points, commits, found = Points([].append), list[Any](), list[int]()
    points.add(1)
    points.commit(lambda: commits.append(copy.deepcopy(points.committed)))
    Points(found.append).resume(commits[0])
    assert found == [1]

"""What a rank measures of its own work, from which parts are dealt by speed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.replica.steps.step import Drawn, Outcome, Step
from raysgd.torch.step.parts.dealing import Dealer, OwnSeconds


class Clock:
    """A host's time, and a device that computes the same later."""

    def __init__(self) -> None:
        self.now, self.late = 0.0, 0.0


class Event:
    clock: Clock

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self._at = self.clock.now

    def query(self) -> bool:
        return self._at <= self.clock.now - self.clock.late

    def elapsed_time(self, other: "Event") -> float:
        assert other.query(), "read before the device has got so far"
        return 1000 * (other._at - self._at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    Event.clock = Clock()
    monkeypatch.setattr("raysgd.torch.step.parts.dealing.perf_counter", lambda: Event.clock.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.clock


def step(own: OwnSeconds, clock: Clock, parts: int, *, waits: float = 0.0) -> None:
    """Compute parts of 2 s; the last waits for others within, and for 10 s in the exchange of gradients."""
    for part in range(parts):
        own.begin()
        if part == parts - 1 and waits:
            with own.waiting():
                clock.now += waits
        clock.now += 2.0
        own.computed()
    clock.now += 10.0
    own.end(parts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_rank_waits_for_others_is_not_its_own(device: str, clock: Clock) -> None:
    own = OwnSeconds(torch.device(device))
    assert own.of_part(50) == 0.0
    for parts, waits in ((1, 0.0), (3, 5.0), (2, 0.0)):
        step(own, clock, parts, waits=waits)
        assert own.of_part(1) == pytest.approx(2.0)
    own.begin()
    clock.now += 50.0  # a step that fails
    own.forget()
    clock.now += 100.0  # until the next call
    step(own, clock, 4)
    assert own.of_part(1) == pytest.approx(2.0)


def test_a_step_that_does_not_count_asks_nothing_of_a_device_that_has_failed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, clock.late = OwnSeconds(torch.device("cuda")), 40.0
    step(own, clock, 1)
    own.begin()
    for method in ("record", "query", "elapsed_time"):
        monkeypatch.setattr(Event, method, lambda *_: pytest.fail("its error would hide the first one"))
    own.forget()


def test_times_of_a_device_are_read_when_it_has_got_so_far(clock: Clock) -> None:
    own, clock.late = OwnSeconds(torch.device("cuda")), 40.0
    for _ in range(3):
        step(own, clock, 2)
        assert own.of_part(50) == 0.0
    for _ in range(3):
        step(own, clock, 2)
    assert own.of_part(50) == pytest.approx(2.0)


def test_the_time_between_two_steps_counts(clock: Clock) -> None:
    own = OwnSeconds(torch.device("cpu"))
    step(own, clock, 1)
    clock.now += 3.0  # the loader
    step(own, clock, 1)
    assert own.of_part(1) == pytest.approx(5.0)
    assert own.of_part(2) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("outcome", "failed", "took"),
    [("applied", False, 2.0), ("skipped", False, 0.0), ("undone", False, 0.0), ("applied", True, 0.0)],
)
def test_only_steps_that_were_made_are_measured(outcome: Outcome, failed: bool, took: float, clock: Clock) -> None:
    absent: Any = dict.fromkeys(("keep_batch", "part_states"))
    solo, weigh = SimpleNamespace(solo=True), SimpleNamespace()
    internals = SimpleNamespace(**absent, registered=SimpleNamespace(calls=None), rank_info=solo, weigh=weigh)
    dealer, made = Dealer(4, internals, torch.device("cpu")), Step(Drawn(None, 8))
    dealer.begin_part(made)
    clock.now += 2.0
    dealer.seconds.computed()
    made.outcome, made.failed = outcome, failed
    dealer.end_step(made)
    assert dealer.seconds.of_part(1) == took

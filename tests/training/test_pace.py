"""What the loops of a worker have taken: over all of them, until its generation changes."""

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.measures.speed import Sums
from raysgd.replica import pace
from raysgd.replica.pace import Pace


class Loop:
    """A loop in which 4 batches take 2 s: 1 s for data, 0.5 s of it hidden, and 0.25 s without a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.queued = 0.0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(pace, "_queued_s", lambda: self.queued)
        self.position = SimpleNamespace(step=7)

    def run(self, own: Pace) -> None:
        loader = SimpleNamespace(num_workers=2, pin_memory=False)
        feed: Any = SimpleNamespace(position=self.position, source=SimpleNamespace(loader=loader))
        feed.waited_s = feed.hidden_s = feed.agreed_s = 0.0
        feed.parts = 0
        self.now += 100.0  # between the loops
        own.begin(feed)
        feed.waited_s, feed.hidden_s, feed.agreed_s, feed.parts = 1.0, 0.5, 0.125, 8
        self.now, self.queued, self.position.step = self.now + 2.0, self.queued + 0.25, self.position.step + 4


def test_loops_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, own = Loop(monkeypatch), Pace()
    loop.run(own)
    one = Sums(4, 8, 2.0, 1.0, 0.5, None, 0.25, "num_workers=2, pin_memory=False")
    assert own.sums() == one, "no exchange was measured"
    own.wait_s, own.exchanges = 0.75, 4
    own.end()
    own.end()
    assert own.sums() == one._replace(wait=0.875)
    loop.run(own)
    assert own.sums() == Sums(8, 16, 4.0, 2.0, 1.0, 1.0, 0.5, "num_workers=2, pin_memory=False")
    own.reset()
    assert own.sums() == Sums()


def test_what_ddp_measures_counts_for_the_steps_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, own, newest = Loop(monkeypatch), Pace(), iter([0.1, 0.2, 3.0])
    own.newest = lambda: next(newest)
    loop.run(own)
    assert own.sums().wait == own.sums().wait == pytest.approx(0.125 + 4 * 0.1)
    for least in (2 * 0.2, 1.0):  # the last one is longer than these steps
        loop.position.step, loop.now = loop.position.step + 2, loop.now + 1.0
        before = own.wait_s
        own.sums()
        assert own.wait_s - before == pytest.approx(least)


def test_the_system_says_how_long_a_thread_had_no_processor() -> None:
    if pace.SCHEDULER.exists():
        assert 0 < pace._queued_s() < 1e6

"""For how long a step waits for the gradients of others: from the end of its own to the end of the exchange."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.core.measures.timers import Timers
from raysgd.core.ranks import RankInfo
from raysgd.replica.pace import Pace
from raysgd.replica.steps.step import Drawn, Step
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.registered import Registered
from raysgd.torch.step import options as step_options
from raysgd.torch.step.options import DuringExchange


class Ground:
    """A policy whose clock passes as long as its steps take. DDP's exchange is a callback that a gradient queues."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, reads_s: float | None = None) -> None:
        self.now, self.parts, self.pace = 100.0, Registered(), Pace()
        monkeypatch.setattr(step_options, "perf_counter", lambda: self.now)
        self.policy = DuringExchange(self.parts, Timers(), self.pace, reads=reads_s is not None)
        self.feed: Any = SimpleNamespace(
            rank_info=RankInfo(world_size=2),
            source=None,
            waited_s=0.0,
            hidden_s=0.0,
            read_ahead=lambda: self.take(reads_s),
        )
        self.policy.begin_loop(self.feed)
        self.policy._feed = None if reads_s is None else self.feed

    def take(self, seconds: float | None) -> None:
        self.now += seconds or 0.0

    def step(self, *, exchange_s: float, own_s: float = 0.0, closing: bool = True) -> None:
        self.parts.control.begun += 1
        self.take(own_s)
        weight = torch.ones(1, requires_grad=True)
        loss = self.policy.on_backward(Step(Drawn(None, 0, last_part=closing)), 2 * weight)
        weight.register_hook(lambda _: run_after_backward(lambda: self.take(exchange_s)))
        loss.backward()


def test_the_wait_is_that_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch)
    ground.step(exchange_s=0.3, own_s=1.0)
    ground.step(exchange_s=0.2, own_s=1.0)
    ground.step(exchange_s=0.0, closing=False)
    assert (ground.pace.wait_s, ground.pace.exchanges) == (pytest.approx(0.5), 2)


def test_of_fast_steps_one_counts_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch)
    for _ in range(1000):
        ground.step(exchange_s=0.0005, own_s=0.0005)
    assert 100 < ground.pace.exchanges < 250
    assert ground.pace.wait_s == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("reads_s", "exchange_s", "hidden"), [(0.4, 0.1, True), (0.4, 0.0, False)])
def test_reading_is_hidden_only_while_gradients_are_exchanged(
    monkeypatch: pytest.MonkeyPatch, reads_s: float, exchange_s: float, hidden: bool
) -> None:
    ground = Ground(monkeypatch, reads_s=reads_s)
    for _ in range(3):
        ground.step(exchange_s=exchange_s)
    assert ground.feed.waited_s == pytest.approx(3 * reads_s)
    assert ground.feed.hidden_s == pytest.approx(3 * reads_s * hidden)
    assert ground.pace.wait_s == pytest.approx(3 * exchange_s)

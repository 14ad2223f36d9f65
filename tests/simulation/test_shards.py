"""Sharded models in virtual time: survivors with all shards continue in place, others load a checkpoint, or the call ends."""

from collections.abc import Callable

import pytest

from raysgd.engine import recovery
from raysgd.engine.engine import Engine
from raysgd.engine.generation import Generation
from tests.simulation.plan import Fault, Plan
from tests.simulation.scenario import Result, run
from tests.simulation.seeds import simulate

SEEDS = 150
Patch = pytest.MonkeyPatch


def of_two(*script: str, kills: int = 1, at: int = 16, replicas: int = 1, ranks: int = 2) -> Result:
    """Run a script in which workers fail in a step of the second epoch."""
    faults = (Fault("kill", "applied", at, others=kills - 1),)
    plan = Plan(
        ranks=ranks, nodes=(ranks,), samples=6 * ranks, grow=False, snapshot_every=None, script=script, faults=faults
    )
    return run(Plan(**{**vars(plan), "replicas": replicas}))


def redone(result: Result) -> list[tuple[bool, int]]:
    assert result.error is None, result.error
    return [(each.in_place, each.batches_redone) for each in result.recoveries]


def test_a_lost_shard_is_in_the_checkpoint() -> None:
    """Of the end of the first epoch, of the middle of the second, and of a state that was loaded."""
    assert redone(of_two("train", "save", "train")) == [(False, 2)]
    assert redone(of_two("fit 3", "fit 3")) == [(False, 5)]
    assert redone(of_two("save", "train", "train")) == [(False, 8)]
    assert redone(of_two("train", "save", "load", "train", kills=2)) == [(False, 1)]


def test_without_a_checkpoint_the_call_ends() -> None:
    for script in (("train", "train"), ("train", "save", "apply", "train")):
        result = of_two(*script)
        assert result.error is None and result.steps < 12
        assert not result.recoveries[0].in_place or result.recoveries[0].batches_redone == 0


def test_copies_of_the_shards_need_none() -> None:
    assert redone(of_two("train", "train", replicas=2, ranks=4, at=30)) == [(True, 0)]


def test_seeds() -> None:
    total = simulate(0, SEEDS, kind="sharded")
    assert not total.failed
    assert total.redone > 0


def ignore_lost_shards(patch: Patch) -> None:
    patch.setattr(Generation, "lacks_shards", lambda self, workers: False)


def load_a_checkpoint_without_need(patch: Patch) -> None:
    patch.setattr(Generation, "lacks_shards", lambda self, workers: self.is_sharded)


def train_no_call_again(patch: Patch) -> None:
    patch.setattr(Engine, "_run_again", lambda self, running: None)


def begin_again_with_lost_shards(patch: Patch) -> None:
    patch.setattr(recovery, "shards_lost_error", lambda left, before: ValueError("lost"))


@pytest.mark.more
@pytest.mark.parametrize(
    "breaks",
    [
        ignore_lost_shards,
        load_a_checkpoint_without_need,
        train_no_call_again,
        begin_again_with_lost_shards,
    ],
)
def test_the_simulation_detects(breaks: Callable[[Patch], None], monkeypatch: Patch) -> None:
    breaks(monkeypatch)
    assert any(simulate(first, 50, kind="sharded").failed for first in range(0, 1000, 50))

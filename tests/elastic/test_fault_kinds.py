"""Kinds of faults that the other tests do not have: after each, every sample was used once, and the ranks' weights are equal."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground
from tests.harming import Injected, forget_memory_limits, why_no_memory_limit
from tests.peek import before_joining

pytestmark = pytest.mark.elastic

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    elastic = ElasticConfig(hang_timeout_s=LIMIT_S)
    ground = Ground(tmp_path_factory.mktemp("kinds"), num_workers=3, elastic=elastic)
    yield ground
    ground.trainer.shutdown()
    forget_memory_limits()


@pytest.fixture
def ground(shared: Ground) -> Iterator[Ground]:
    shared.whole_again(3)
    shared.trained()
    shared.arm()  # a rank that is slow stays slow
    yield shared
    seen = shared.trained()
    assert seen[0] >= 1 and seen == dict.fromkeys(range(shared.samples), seen[0])
    assert all(len({str(weight) for weight in weights}) == 1 for weights in zip(*of_each_rank(shared), strict=True))


def of_each_rank(ground: Ground) -> list[list[object]]:
    return ground.trainer.apply_all_operators(lambda operator: [each.tolist() for each in operator.model.parameters()])


@pytest.mark.parametrize(
    ("rank", "kind", "where"), [(0, "segfault", "backward"), (1, "abort", "after"), (2, "memory", "before")]
)
def test_a_process_is_ended_by_the_system(ground: Ground, rank: int, kind: str, where: str) -> None:
    if kind == "memory" and why_no_memory_limit():
        pytest.skip(why_no_memory_limit())
    ground.arm(Fault(rank, 7, kind, where))
    before = len(ground.trainer.recoveries)
    assert ground.trainer.train()["num_samples"] == ground.samples
    assert ground.fired() == 1
    failure = ground.trainer.recoveries[before]
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("worker death", (rank,), True)
    assert failure.batches_redone == 0


def test_an_exception_at_any_moment_reaches_the_user(ground: Ground) -> None:
    """Another thread raises it in the training thread. It is a user error: nothing is retried, and no worker fails."""
    ground.arm(Fault(1, 9, "exception", "backward"))
    before = len(ground.trainer.recoveries)
    with pytest.raises(Injected) as caught:
        ground.trainer.train()
    assert caught.value.raysgd_rank == 1  # type: ignore[attr-defined]
    ground.trainer.train()
    assert len(ground.trainer.recoveries) == before and ground.trainer.world_size == 3


def test_ranks_rejoin_after_the_network_was_cut(ground: Ground) -> None:
    before = len(ground.trainer.recoveries)
    ground.arm(Fault(1, 6, "cut", "backward"))
    ground.trainer.train()
    cut = ground.trainer.recoveries[before]
    assert (cut.reason, cut.removed_ranks, cut.world_size_after, cut.in_place) == ("network", (), 3, True)


def test_connections_that_are_half_open(ground: Ground) -> None:
    """Nothing reaches rank 1 anymore, and no connection is closed. Its process ends itself after the same time as the driver ends it, so
    on a busy machine either may be first."""
    ground.arm(Fault(1, 6, "half-open", "backward"))
    before = len(ground.trainer.recoveries)
    ground.trainer.train()
    assert ground.fired() == 1
    failure = ground.trainer.recoveries[before]
    assert failure.reason in ("network", "hang", "node failure", "worker death")
    assert (failure.removed_ranks, failure.in_place, failure.batches_redone) == ((1,), True, 0)


def test_a_slow_rank_is_not_ended(ground: Ground) -> None:
    """Its last batches take two seconds each, which is less than the limit. It causes warnings."""
    ground.arm(Fault(2, 17, "slow", seconds=2.0))
    before = len(ground.trainer.recoveries)
    ground.trainer.train()
    assert ground.fired() == 1
    assert len(ground.trainer.recoveries) == before and ground.trainer.world_size == 3


def test_the_driver_is_stopped_for_longer_than_the_limit(ground: Ground) -> None:
    """When it continues, it has heard nothing for long, and no worker has failed."""
    before, seconds = len(ground.trainer.recoveries), LIMIT_S * 1.25
    pause = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"

    def stop_after_a_step(operator: Any) -> None:
        operator.config.update(pace=0.5)
        if operator.world_rank == 0:
            commands = [["sh", "-c", pause]]
            operator.optimizer.register_step_post_hook(lambda *_: commands and subprocess.Popen(commands.pop()))

    ground.trainer.apply_all_operators(stop_after_a_step)
    started = time.monotonic()
    ground.trainer.train()
    ground.trainer.apply_all_operators(lambda operator: operator.config.update(pace=0.0))
    assert time.monotonic() - started > seconds
    assert len(ground.trainer.recoveries) == before and ground.trainer.world_size == 3


def die_when_joining_again(marks: str) -> Any:
    """An initialization hook: once, the process is killed when it joins its second generation."""

    def hook() -> None:
        meetings: list[int] = []

        def dies(rank: int) -> None:
            meetings.append(rank)
            if len(meetings) == 2 and rank == 1:
                Fault(1, 0, "kill", "rendezvous").fire(marks)

        before_joining(dies)

    return hook


def test_a_worker_fails_during_the_rendezvous(ray_cluster: None, tmp_path: Path) -> None:
    marks, elastic = tmp_path / "marks", ElasticConfig(grow=False, hang_timeout_s=60)
    made = Ground(marks, num_workers=4, elastic=elastic, initialization_hook=die_when_joining_again(str(marks)))
    with made.trainer as trainer:
        made.arm(Fault(3, 6))
        trainer.train()
        made.assert_epoch_exact()
        failure = trainer.recoveries[0]
        assert (failure.removed_ranks, failure.world_size_after, failure.in_place) == ((1, 3), 2, True)

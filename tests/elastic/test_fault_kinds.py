"""Kinds of faults that the other tests do not have: after each, every sample was used once, and the ranks' weights are equal."""

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground
from tests.harming import Injected, forget_memory_limits, why_no_memory_limit

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

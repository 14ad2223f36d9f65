"""Planned changes (growth, `resize`, preemption notices): no batch is lost or repeated."""

import time
from collections.abc import Iterator

import pytest

from raysgd import ConfigError, ElasticConfig
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(
        tmp_path_factory.mktemp("members"),
        num_workers=3,
        config={"samples": 1200, "pace": 0.02},
        elastic=ElasticConfig(hang_timeout_s=60),
    )
    yield ground
    ground.trainer.shutdown()


def test_a_replacement_joins_in_the_middle_of_an_epoch(ground: Ground) -> None:
    ground.arm(Fault(1, 3))
    before = len(ground.trainer.recoveries)
    deadline = time.monotonic() + 60
    while len(ground.trainer.recoveries) < before + 2 and time.monotonic() < deadline:
        ground.trainer.train()
        ground.assert_epoch_exact()
    failure, growth = ground.trainer.recoveries[before : before + 2]
    assert (failure.reason, growth.reason) == ("worker death", "growth")
    assert (growth.world_size_before, growth.world_size_after) == (2, 3)
    assert growth.in_place and growth.batches_redone == 0


def test_resized_is_called_for_every_change(ground: Ground) -> None:
    ground.whole_again(3)
    heard = ground.trainer.apply_all_operators(lambda operator: (operator.resizes, operator.world_size))
    assert all(world == 3 for _, world in heard)
    assert heard[0][0][:2] == [(3, 2), (2, 3)]


def test_resize_by_hand_in_the_middle_of_an_epoch(ground: Ground) -> None:
    trainer = ground.trainer
    trainer.train(num_steps=5)
    trainer.resize(1)
    assert trainer.world_size == 1
    trainer.train(num_steps=5)
    trainer.resize(3)
    assert trainer.world_size == 3
    trainer.train()
    ground.assert_epoch_exact()
    assert [r.reason for r in trainer.recoveries[-2:]] == ["shrink", "growth"]


@pytest.mark.parametrize("count", [0, -1, 2.5, "2"])
def test_resize_refuses_invalid_numbers(ground: Ground, count: object) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        ground.trainer.resize(count)


def test_sigterm_shrinks_the_group_at_a_batch_boundary(ground: Ground) -> None:
    ground.whole_again(3)
    ground.arm(Fault(1, 6, "term"))
    before = len(ground.trainer.recoveries)
    result = ground.trainer.train()
    ground.assert_epoch_exact()
    notice = ground.trainer.recoveries[before]
    assert (notice.reason, notice.removed_ranks, notice.batches_redone) == ("preemption", (1,), 0)
    assert result["num_samples"] == ground.samples


def test_a_failure_while_ranks_stop_for_a_replacement(ground: Ground) -> None:
    ground.whole_again(3)
    ground.arm(Fault(1, 3), Fault(0, 0, where="save"))
    ground.trainer.train(max_retries=-1)
    ground.whole_again(3)
    ground.trainer.train(max_retries=-1)
    assert set(ground.trained().values()) == {2}


@pytest.mark.parametrize("grow", ["epoch", False])
def test_growth_only_between_calls_or_never(ray_cluster: None, tmp_path, grow: object) -> None:
    elastic = ElasticConfig(grow=grow, hang_timeout_s=60)
    ground = Ground(tmp_path / "grow", num_workers=2, config={"samples": 200, "pace": 0.01}, elastic=elastic)
    try:
        ground.arm(Fault(1, 3))
        deadline = time.monotonic() + (60 if grow else 6)
        while len(ground.trainer.recoveries) < 2 and time.monotonic() < deadline:
            result = ground.trainer.train()
            ground.assert_epoch_exact()
        reasons = [recovery.reason for recovery in ground.trainer.recoveries]
        assert reasons == (["worker death", "growth"] if grow else ["worker death"])
        assert not grow or ground.trainer.recoveries[1].batch == 50 > result["batch_count"]
    finally:
        ground.trainer.shutdown()

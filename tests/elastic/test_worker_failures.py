"""Workers are killed at every place; the survivors continue, and the ledger shows each sample exactly once."""

import os
import signal
from collections.abc import Iterator

import pytest

from raysgd import ElasticConfig, TrainingFailedError
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(tmp_path_factory.mktemp("failures"), num_workers=3, elastic=ElasticConfig(hang_timeout_s=60))
    yield ground
    ground.trainer.shutdown()


@pytest.fixture
def ground(shared: Ground) -> Ground:
    shared.whole_again(3)
    shared.trained()
    return shared


# tests/local/test_faults.py has every place and rank, and test_both_apis.py several failures at once and in a row.
@pytest.mark.parametrize(("rank", "step", "where", "kind"), [(0, 1, "before", "kill"), (2, 20, "backward", "exit")])
def test_one_of_three_workers_fails_in_an_epoch(ground: Ground, rank: int, step: int, where: str, kind: str) -> None:
    ground.arm(Fault(rank, step, kind, where))
    before = len(ground.trainer.recoveries)
    result = ground.trainer.train()
    assert ground.fired() == 1
    ground.assert_epoch_exact()
    failure = ground.trainer.recoveries[before]
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("worker death", (rank,), True)
    assert (failure.world_size_before, failure.world_size_after, failure.batches_redone) == (3, 2, 0)
    assert result["num_samples"] == ground.samples


def test_a_survivor_fails_while_it_loads_the_state(ground: Ground) -> None:
    ground.arm(Fault(1, 6, where="after"), Fault(2, 6, where="load"), Fault(0, 6, where="load"))
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_a_failure_while_idle(ground: Ground) -> None:
    victim = ground.trainer.apply_all_workers(os.getpid)[1]
    before = len(ground.trainer.recoveries)
    os.kill(victim, signal.SIGKILL)
    ground.trainer.train()
    ground.assert_epoch_exact()
    assert ground.trainer.recoveries[before].reason == "worker death"


def test_a_failure_in_apply_keeps_the_survivors_values(ground: Ground) -> None:
    victim = ground.trainer.apply_all_workers(os.getpid)[1]

    def die() -> int:
        if os.getpid() == victim:
            os._exit(1)
        return os.getpid()

    answers = ground.trainer.apply_all_workers(die)
    assert len(answers) == 2 and victim not in answers


def test_a_failure_in_save(ground: Ground, tmp_path) -> None:
    ground.arm(Fault(0, 1, where="save"))
    path = ground.trainer.save(tmp_path / "saved.pt")
    assert ground.fired() == 1
    ground.trainer.load(path, trusted=True)
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_num_steps_with_a_failure(ground: Ground) -> None:
    ground.trainer.train(num_steps=3)
    ground.arm(Fault(1, 4))
    result = ground.trainer.train(num_steps=10)
    assert result["batch_count"] == 10
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_more_failures_than_max_retries_raise_an_error_that_lists_them(ground: Ground) -> None:
    ground.arm(Fault(0, 3), Fault(1, 8))
    with pytest.raises(TrainingFailedError, match=r"max_retries=1.*(?s:.*)worker death in epoch \d+, batch \d+"):
        ground.trainer.train(max_retries=1)
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_max_retries_0_allows_no_worker_failure(ground: Ground) -> None:
    ground.arm(Fault(0, 3))
    with pytest.raises(TrainingFailedError, match="max_retries=0"):
        ground.trainer.train(max_retries=0)
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_uneven_tail_drop_last_and_loader_processes(ray_cluster: None, tmp_path) -> None:
    loader = {"num_workers": 1, "persistent_workers": True}
    config = {"samples": 101, "loader": loader}
    ground = Ground(tmp_path / "uneven", num_workers=3, config=config)
    try:
        for _ in range(2):
            ground.arm(Fault(1, 3))
            ground.trainer.train()
            ground.assert_epoch_exact()
    finally:
        ground.trainer.shutdown()

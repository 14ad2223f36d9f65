"""Workers end in an epoch, while idle, in a save and in a user's function. They have processes of data loaders, and the epoch has an
uneven tail. tests/local has every place and rank, failures in a row, and their limits."""

import os
import signal
from collections.abc import Iterator

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    config = {"samples": 101, "loader": {"num_workers": 1, "persistent_workers": True}}
    elastic = ElasticConfig(hang_timeout_s=60)
    ground = Ground(tmp_path_factory.mktemp("failures"), num_workers=3, config=config, elastic=elastic)
    ground.trainer.train()  # a state that is lost later shows in what the weights have seen
    yield ground
    ground.trainer.shutdown()


@pytest.fixture
def ground(shared: Ground) -> Ground:
    shared.whole_again(3)
    shared.trained()
    return shared


def test_one_of_three_workers_fails_in_an_epoch(ground: Ground) -> None:
    ground.arm(Fault(2, 6, "exit", "backward"))
    before = len(ground.trainer.recoveries)
    result = ground.trainer.train()
    assert ground.fired() == 1
    ground.assert_epoch_exact()
    failure = ground.trainer.recoveries[before]
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("worker death", (2,), True)
    assert (failure.world_size_before, failure.world_size_after, failure.batches_redone) == (3, 2, 0)
    assert result["num_samples"] == ground.samples


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

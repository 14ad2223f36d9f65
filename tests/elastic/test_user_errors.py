"""User errors of all ranks, beside a failure, and in validation. test_both_apis.py has one rank's in training."""

from collections.abc import Iterator

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(tmp_path_factory.mktemp("errors"), num_workers=3, elastic=ElasticConfig(hang_timeout_s=60))
    yield ground
    ground.trainer.shutdown()


def test_all_ranks_raise_at_once(ground: Ground) -> None:
    ground.arm(*(Fault(rank, 2, "raise") for rank in range(3)))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.train()
    ground.arm()  # a rank that another rank's error interrupted has not raised its own
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_a_user_error_and_a_failure_at_once_raise_the_user_error(ground: Ground) -> None:
    ground.arm(Fault(0, 4, "raise"), Fault(2, 4, "kill"))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.train()
    ground.whole_again(3)
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_an_error_in_validation(ground: Ground) -> None:
    # One peer has finished its part by then; the other one is interrupted in the middle of it.
    ground.arm(Fault(1, 1, "raise", "validate"), Fault(0, 1, "sleep", "validate", seconds=1.0))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.validate()
    assert ground.trainer.validate()["num_samples"] == 50

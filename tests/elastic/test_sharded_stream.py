"""A ShardedStream on three workers of which some fail: every sample is used exactly once."""

from collections.abc import Iterator

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground
from tests.local.test_loops_and_data import SAMPLES, Sharded

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder, config = tmp_path_factory.mktemp("shards"), {"samples": SAMPLES}
    elastic = ElasticConfig(hang_timeout_s=5)
    made = Ground(folder / "marks", operator=Sharded, num_workers=3, config=config, elastic=elastic)
    yield made
    made.trainer.shutdown()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(1, 6),
        Fault(0, 3, where="after"),
        pytest.param(Fault(2, 4, "stop"), marks=pytest.mark.more),
        pytest.param(Fault(1, 5, "term"), marks=pytest.mark.more),
    ],
    ids=lambda fault: fault.name,
)
def test_an_epoch_in_which_a_worker_fails_or_leaves(ground: Ground, fault: Fault) -> None:
    ground.whole_again(3)
    ground.arm(fault)
    assert ground.trainer.train()["num_samples"] == SAMPLES
    assert ground.fired() == 1
    ground.assert_epoch_exact()
    assert ground.trainer.validate()["num_samples"] == SAMPLES

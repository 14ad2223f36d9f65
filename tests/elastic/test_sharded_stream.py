"""A ShardedStream on three workers of which some fail: every sample is used exactly once."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

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


def test_two_epochs_in_which_workers_fail(ground: Ground) -> None:
    for fault in (Fault(1, 6), Fault(0, 3, where="after")):
        ground.whole_again(3)
        ground.arm(fault)
        assert ground.trainer.train()["num_samples"] == SAMPLES
        assert ground.fired() == 1
        ground.assert_epoch_exact()
    assert ground.trainer.validate()["num_samples"] == SAMPLES


def disturbed_epoch(ground: Ground, choose: random.Random, kinds: Sequence[str]) -> int:
    """Train an epoch in which these things happen: a rank is killed or stopped ("kill", "stop"), leaves as planned ("term"),
    another worker is added ("join"), a shard cannot be read ("read"). Return how many did."""
    trainer, joined = ground.trainer, kinds.count("join")
    trainer.resize(3)  # a worker that had a notice in the last epoch may leave now, and is then replaced
    ground.whole_again(3)
    places = ["before", "backward", "after"]
    of_ranks = [each for each in kinds if each in ("kill", "stop", "term")]
    ground.arm(*(Fault(choose.randrange(3), choose.randint(1, 9), each, choose.choice(places)) for each in of_ranks))
    unreadable = Fault(0, choose.randrange(SAMPLES), "raise", "read", tag=f"-{choose.random()}")
    at = unreadable.step if "read" in kinds else -1
    trainer.apply_all_operators(lambda operator: setattr(operator, "unreadable", (at, unreadable)))
    for steps in [*(choose.randint(1, 3) for _ in range(joined)), None]:
        try:
            trainer.train(num_steps=steps)
        except RuntimeError as error:
            assert "of a ShardedStream of 7 shards raised an error" in str(error) and "planned in" in str(error)
            if steps is None:
                trainer.train()
        if steps is not None:
            trainer.resize(4)
    ground.assert_epoch_exact()
    return ground.fired() + joined + (ground.marks / unreadable.name).exists()


@pytest.mark.more
def test_two_epochs_with_a_fault_of_each_kind(ground: Ground) -> None:
    choose = random.Random(1)
    happened = disturbed_epoch(ground, choose, ["kill", "read", "join"])
    happened += disturbed_epoch(ground, choose, ["stop", "term"])
    assert happened == 5


@pytest.mark.nightly
def test_thirty_random_faults(ground: Ground) -> None:
    choose, happened = random.Random(5), Counter[str]()
    while happened.total() < 30:
        kinds = choose.choices(
            ["kill", "stop", "term", "join", "read"], weights=[5, 2, 3, 3, 3], k=choose.randint(1, 3)
        )
        happened[" ".join(kinds)] += disturbed_epoch(ground, choose, kinds)
    print(happened)

"""A ShardedStream on three workers of which some fail: every sample is used exactly once, also after a load."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ElasticConfig
from raysgd.data import ShardedStream
from tests.faults import Fault, Ground, LedgerOperator, Numbered
from tests.torch.small import inline, operator_of

pytestmark = pytest.mark.elastic

LENGTHS = (5, 40, 1, 63, 17, 0, 34)
SAMPLES = sum(LENGTHS)


class Sharded(LedgerOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        samples, starts = Numbered(SAMPLES), [0, *accumulate(LENGTHS)]

        def open_shard(shard: int) -> Iterator[Any]:
            if config.get("broken") == shard:
                raise OSError("no such file")
            return (samples[index] for index in range(starts[shard], starts[shard + 1]))

        shards = config.get("shards", len(LENGTHS))
        stream = ShardedStream(open_shard, shards, batch_size=4, shuffle=8, readers=2)
        self.register_data(train_loader=stream, validation_loader=ShardedStream(open_shard, shards, batch_size=4))


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    made = Ground(
        tmp_path_factory.mktemp("shards"),
        operator=Sharded,
        num_workers=3,
        config={"samples": SAMPLES},
        elastic=ElasticConfig(hang_timeout_s=60),
    )
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


def test_another_number_of_workers_resumes_in_the_middle_of_an_epoch(ground: Ground) -> None:
    ground.whole_again(3)
    ground.trainer.train(num_steps=4)
    state = ground.trainer.state_dict()
    before = Counter(state["operator"]["ledger"])
    with inline(Sharded) as alone:
        alone.load_state_dict(state)
        alone.train()
        assert Counter(operator_of(alone).ledger) == Counter(dict.fromkeys(range(SAMPLES), max(before.values())))
    ground.trainer.train()
    ground.assert_epoch_exact()
    with (
        inline(Sharded, config={"shards": 6}) as other,
        pytest.raises(CheckpointError, match=r"7 shards, and the .* 6"),
    ):
        other.load_state_dict(state)


def test_a_call_after_the_last_batch_begins_the_next_epoch() -> None:
    with inline(Sharded, config={"samples": SAMPLES}) as alone:
        for _ in range(SAMPLES // 4):
            alone.train(num_steps=1)
        assert alone.train(num_steps=3)["epoch"] == 2
        ledger = operator_of(alone).ledger
        assert Counter(ledger[:SAMPLES]) == Counter(range(SAMPLES)) and ledger[:12] != ledger[SAMPLES:]


def test_an_error_in_a_shard_names_it() -> None:
    with (
        inline(Sharded, config={"broken": 3}) as trainer,
        pytest.raises(RuntimeError, match=r"shard 3 of a Sharded.*OSE"),
    ):
        trainer.train()


@pytest.mark.soak
def test_a_hundred_random_faults(ground: Ground, tmp_path: Path) -> None:
    choose, fired = random.Random(5), 0
    while fired < 100:
        for _ in range(2):
            ground.whole_again(3)
            where = choose.choice(["before", "backward", "after"])
            steps = choose.sample(range(1, 12), 2)
            kinds = [choose.choice(["kill", "exit"]) for _ in steps]
            ground.arm(
                *(Fault(choose.randrange(3), step, kind, where) for step, kind in zip(steps, kinds, strict=True))
            )
            ground.trainer.train()
            fired += ground.fired()
            ground.assert_epoch_exact()

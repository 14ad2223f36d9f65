"""Worker failures with all kinds of loops and data: custom loops, live iterators, cut networks, repeated failures."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from raysgd import ElasticConfig, TrainingFailedError
from raysgd.torch.process_group import TorchBackend
from tests.faults import Fault, Ground, LedgerOperator, Numbered

pytestmark = pytest.mark.elastic

QUIET = ElasticConfig(grow=False, hang_timeout_s=60)


@pytest.fixture
def make(ray_cluster: None, tmp_path: Path) -> Iterator[Any]:
    made: list[Ground] = []

    def ground(**arguments: Any) -> Ground:
        made.append(Ground(tmp_path / "marks", **{"num_workers": 3, "elastic": QUIET, **arguments}))
        return made[-1]

    yield ground
    for each in made:
        each.trainer.shutdown()


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    made = Ground(tmp_path_factory.mktemp("loops"), num_workers=3, elastic=QUIET)
    yield made
    made.trainer.shutdown()


def begin(ground: Ground, make: Callable[[], Any], samples: int = 240) -> None:
    """Give all three ranks this training loader, and begin an epoch with it."""
    ground.whole_again(3)
    ground.trainer.apply_all_operators(lambda operator: operator.register_data(train_loader=make()))
    ground.trained()
    ground.samples = samples


class OwnLoop(LedgerOperator):
    """A custom loop with v1's signature, and an `except` that must not catch the exceptions that stop it."""

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        losses = []
        for batch in iterator:
            losses.append(self.train_batch(batch, {})["train_loss"])
            self.global_step += 1
        return {"mean_loss": torch.stack(losses).mean().item() if losses else 0.0}


def test_a_custom_train_epoch(make: Any) -> None:
    ground = make(operator=OwnLoop)
    ground.arm(Fault(1, 6), Fault(0, 11, where="after"))
    result = ground.trainer.train()
    assert ground.fired() == 2
    ground.assert_epoch_exact()
    assert result["epoch"] == 1 and result["mean_loss"] > 0


def test_growth_during_a_custom_train_epoch(make: Any) -> None:
    ground = make(operator=OwnLoop, elastic=ElasticConfig(), config={"samples": 1200, "pace": 0.02}, num_workers=2)
    ground.arm(Fault(1, 6))
    for _ in range(8):
        ground.trainer.train()
        ground.assert_epoch_exact()
        if ground.trainer.world_size == 2:
            break
    assert [recovery.reason for recovery in ground.trainer.recoveries] == ["worker death", "growth"]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Divides itself by worker info, as such data sets do."""

    def __init__(self, size: int) -> None:
        self.samples = Numbered(size)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(start, len(self.samples), step):
            yield self.samples[index]


def test_live_iterators_continue_where_they_were(ground: Ground) -> None:
    begin(ground, lambda: DataLoader(Stream(240), batch_size=4))
    ground.arm(Fault(1, 6))
    ground.trainer.train()
    seen = ground.trained()
    assert max(seen.values()) == 1
    survivors = {index for index in range(240) if index % 3 != 1}
    assert survivors <= set(seen), "the survivors train on all samples of their parts, each once"
    assert len(set(seen) - survivors) == 5 * 4, "and of the failed rank's part, on those before the failure"


class Buckets(BatchSampler):
    """A user's batch sampler, whose batches are not split."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(100), generator=torch.Generator().manual_seed(5)), 3, False)


def test_batch_samplers_keep_every_sample(ground: Ground) -> None:
    begin(ground, lambda: DataLoader(Numbered(100), batch_sampler=Buckets()), 100)
    for rank in (1, 0):
        ground.arm(Fault(rank, 4))
        ground.trainer.train()
        ground.assert_epoch_exact()


def test_last_steps_with_fewer_samples_than_ranks(ground: Ground) -> None:
    for size in (1, 5):
        begin(ground, lambda size=size: DataLoader(Numbered(size), batch_size=2), size)
        ground.arm(Fault(2, 1))
        result = ground.trainer.train()
        assert ground.fired() == 1
        assert set(ground.trained()) == set(range(size))
        assert result["num_samples"] == size


def test_drop_last_drops_less_than_one_step(ground: Ground) -> None:
    begin(ground, lambda: DataLoader(Numbered(101), batch_size=4, drop_last=True))
    ground.arm(Fault(1, 4))
    ground.trainer.train()
    seen = ground.trained()
    assert max(seen.values()) == 1 and 101 - len(seen) < 2 * 4


def test_ranks_rejoin_after_the_network_was_cut(ground: Ground) -> None:
    begin(ground, lambda: DataLoader(Numbered(240), batch_size=4))
    before = len(ground.trainer.recoveries)
    ground.arm(Fault(1, 6, "cut", "backward"))
    ground.trainer.train()
    ground.assert_epoch_exact()
    cut = ground.trainer.recoveries[before]
    assert (cut.reason, cut.removed_ranks, cut.world_size_after, cut.in_place) == ("network", (), 3, True)


def die_when_joining_again(marks: str) -> Any:
    """An initialization hook: once, the process is killed when it joins its second generation."""

    def hook() -> None:
        join, meetings = TorchBackend.join, []

        def dying(self: Any, rank_info: Any, settings: Any) -> None:
            meetings.append(rank_info)
            if len(meetings) == 2 and rank_info.world_rank == 1:
                Fault(1, 0, "kill", "rendezvous").fire(marks)
            join(self, rank_info, settings)

        TorchBackend.join = dying  # type: ignore[method-assign]

    return hook


def test_a_worker_fails_during_the_rendezvous(make: Any, tmp_path: Path) -> None:
    ground = make(num_workers=4, initialization_hook=die_when_joining_again(str(tmp_path / "marks")))
    ground.arm(Fault(3, 6))
    ground.trainer.train()
    ground.assert_epoch_exact()
    failure = ground.trainer.recoveries[0]
    assert (failure.removed_ranks, failure.world_size_after, failure.in_place) == ((1, 3), 2, True)


class Poisoned(LedgerOperator):
    """One sample kills each process that trains on it, like a crash in native code."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if 17 in batch[0].tolist() and self.global_step > 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().train_batch(batch, batch_info)


def test_a_crash_that_repeats_names_its_batch(make: Any) -> None:
    ground = make(operator=Poisoned, elastic=ElasticConfig(hang_timeout_s=60, grow=False))
    with pytest.raises(TrainingFailedError, match="max_retries=2") as caught:
        ground.trainer.train(max_retries=2)
    places = [line for line in str(caught.value).splitlines() if "worker death in epoch 1, batch 1" in line]
    assert len(places) == 3, "the same sample each time; its batch moves a little as fewer ranks share the epoch"

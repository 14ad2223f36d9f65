"""All kinds of loops and data, in which ranks fail: custom loops, live iterators, batch samplers, shards, short epochs."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from raysgd import ConfigError
from tests.faults import LedgerOperator, Numbered
from tests.local import group
from tests.local.ground import Fault, LocalGround
from tests.local.group import Cluster
from tests.torch.small import Line, Numbers, Recording, inline, rows
from tools.check_pages import blocks

Make = Callable[..., LocalGround]


class OwnLoop(LedgerOperator):
    """A custom loop with v1's signature, and an `except` that must not catch the exceptions that stop it."""

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        losses = []
        for batch in iterator:
            losses.append(self.train_batch(batch, {})["train_loss"])
            self.global_step += 1
        return {"mean_loss": torch.stack(losses).mean().item() if losses else 0.0}


def test_a_custom_train_epoch(make: Make) -> None:
    ground = make(operator=OwnLoop)
    ground.arm(Fault(1, 6), Fault(0, 11, where="after"))
    result = ground.trainer.train()
    assert ground.fired() == 2
    ground.assert_epoch_exact()
    assert result["epoch"] == 1 and result["mean_loss"] > 0


def test_growth_during_a_custom_train_epoch(make: Make) -> None:
    ground = make(operator=OwnLoop, elastic={"grow": True})
    ground.arm(Fault(1, 6))
    ground.trainer.train()
    ground.assert_epoch_exact()
    assert [each.reason for each in ground.trainer.recoveries] == ["worker death", "growth"]


class Loading(LedgerOperator):
    """Its loader is that of `config["loader_of"]`."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=config["loader_of"]())


def loading(make: Make, loader: Callable[[], Any], samples: int = 240) -> LocalGround:
    return make(operator=Loading, config={"loader_of": loader, "samples": samples})


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Divides itself by worker info, as such data sets do."""

    def __init__(self, size: int) -> None:
        self.samples = Numbered(size)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(start, len(self.samples), step):
            yield self.samples[index]


def test_live_iterators_continue_where_they_were(make: Make) -> None:
    ground = loading(make, lambda: DataLoader(Stream(240), batch_size=4))
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


def test_batch_samplers_keep_every_sample(make: Make) -> None:
    ground = loading(make, lambda: DataLoader(Numbered(100), batch_sampler=Buckets()), 100)
    for rank in (1, 0):
        ground.arm(Fault(rank, 4))
        ground.trainer.train()
        assert ground.fired() == 1
        ground.assert_epoch_exact()


@pytest.mark.parametrize("size", [1, 5])
def test_last_steps_with_fewer_samples_than_ranks(make: Make, size: int) -> None:
    ground = loading(make, lambda: DataLoader(Numbered(size), batch_size=2), size)
    ground.arm(Fault(2, 1))
    result = ground.trainer.train()
    assert ground.fired() == 1
    assert set(ground.trained()) == set(range(size))
    assert result["num_samples"] == size


def test_drop_last_drops_less_than_one_step(make: Make) -> None:
    ground = loading(make, lambda: DataLoader(Numbered(101), batch_size=4, drop_last=True))
    ground.arm(Fault(1, 4))
    ground.trainer.train()
    seen = ground.trained()
    assert max(seen.values()) == 1 and 101 - len(seen) < 2 * 4


class Computing(Recording):
    """Its batches need time, in which ranks report."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.here.compute()
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.here.compute()
        return super().validate_batch(batch, batch_info)


ANOTHER = "each worker has made another split of the data: the "


@pytest.mark.parametrize("call", ["train", "validate"])
def test_a_split_that_differs_between_ranks_is_an_error_before_training(call: str) -> None:
    def register(operator: Any) -> None:
        parts = random_split(Numbers(101), [61, 40], torch.Generator().manual_seed(operator.world_rank))
        train, validation = (DataLoader(part, 8) for part in parts)
        operator.register_data(train_loader=train, validation_loader=validation)

    def seen(operator: Any) -> int:
        return len(operator.seen)

    with Cluster(), inline(Recording, num_workers=2) as trainer:
        trainer.apply_all_operators(register)
        for _ in range(2):
            said = rf"^{ANOTHER}train_loader has 61 rows with .* on rank 1, and 61 rows .* on rank 0\."
            with pytest.raises(ConfigError, match=said):
                getattr(trainer, call)()
        assert trainer.apply_all_operators(seen) == [0, 0], "batches"


def test_a_split_that_differs_in_data_of_a_later_call_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def register(operator: Any, seed: int) -> None:
        train, _ = random_split(Numbers(101), [61, 40], torch.Generator().manual_seed(seed * operator.world_rank))
        operator.register_data(train_loader=DataLoader(train, 8))

    with Cluster(), inline(Computing, num_workers=2) as trainer:
        for seed in (0, 1, 1):
            trainer.apply_all_operators(partial(register, seed=seed))
            trainer.train()
    assert [ANOTHER in each for each in caplog.messages if "rank 1" in each] == [True]


def test_a_replacement_that_splits_the_data_in_another_way_trains_nothing() -> None:
    made: list[int] = []

    class Unseeded(Line):
        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            made.append(0 if len(made) < 2 else 1)
            data = TensorDataset(*rows(101))
            part, _ = random_split(data, [61, 40], torch.Generator().manual_seed(made[-1]))
            return {"train_loader": DataLoader(part, 8)}

    with Cluster([group.Fault("kill", "forward", rank=1, step=2)]), inline(Unseeded, num_workers=2) as trainer:
        with pytest.raises(ConfigError, match=f"^{ANOTHER}train_loader has"):
            for _ in range(9):
                trainer.train()
        assert made == [0, 0, 1] and trainer.world_size == 2


def test_data_that_differs_between_ranks_for_a_reason_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """raysgd does not divide it, or cannot know its rows."""

    def register(operator: Any) -> None:
        rank = operator.world_rank
        own = {"train_loader": DataLoader(Subset(Numbers(101), range(rank, 100, 2)), 8)}
        batches: Any = [[rank], [rank + 2]]
        listed = {"train_loader": DataLoader(Numbers(8), batch_sampler=batches)}
        operator.register_data(**(own if operator.config["own"] else listed))

    for own in (True, False):
        given = {"config": {"own": own}, "add_dist_sampler": not own}
        with Cluster(), inline(Recording, num_workers=2, **given) as trainer:
            trainer.apply_all_operators(register)
            trainer.train()
    assert "another split" not in caplog.text


def test_a_loader_of_several_that_ranks_do_not_divide_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def register(operator: Any, longer: int = 0) -> None:
        rows = {"equal": Numbers(40), "longer": Numbers(40 + longer * operator.world_rank)}
        operator.register_data(validation_loader={name: DataLoader(data, 8) for name, data in rows.items()})

    with Cluster(), inline(Computing, num_workers=2) as trainer:
        trainer.apply_all_operators(register)
        for _ in range(2):
            trainer.validate()
    assert not any("rank 0" in each for each in caplog.messages)
    with Cluster(), inline(Computing, num_workers=2) as trainer:
        trainer.apply_all_operators(partial(register, longer=1))
        with pytest.raises(
            ConfigError, match=r"validation_loader\['longer'\] has 41 rows on rank 1, and 40 rows on rank 0"
        ):
            trainer.validate()


def test_loaders_with_other_names_on_another_rank_are_an_error() -> None:
    def register(operator: Any) -> None:
        names = sorted(("easy", "hard"), reverse=operator.world_rank == 1)
        operator.register_data(validation_loader={name: DataLoader(Numbers(40), 8) for name in names})

    with Cluster(), inline(Computing, num_workers=2) as trainer:
        trainer.apply_all_operators(register)
        with pytest.raises(
            ConfigError, match=r"ranks 0 and 1 .*\['val_easy_', 'val_hard_'\] and \['val_hard_', 'val_easy_'\]"
        ):
            trainer.validate()


# -- the recipe for shards of files --------------------------------------------------------------------

SHARDS = 12
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "data.md"


def recipe() -> Any:
    """Return the class that the page defines."""
    (block,) = (each for each in blocks(PAGE.read_text(encoding="utf-8"), "data.md") if "class Shards" in each.code)
    names: dict[str, Any] = {}
    exec(block.code, names)
    return names["Shards"]


class OfShards(LedgerOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        samples = Numbered(240)
        data = recipe()(range(SHARDS), lambda shard: (samples[index] for index in range(shard, 240, SHARDS)))
        self.register_data(train_loader=StatefulDataLoader(data, batch_size=4))


@pytest.mark.parametrize("growth", [False, True])
def test_shards_after_a_failure(make: Make, growth: bool) -> None:
    ground = make(operator=OfShards, elastic={"grow": growth})
    ground.arm(Fault(1, 6))
    ground.trainer.train()
    seen = ground.trained()
    lost = [index for index in range(240) if not seen[index]]
    assert len(lost) == 80 - 5 * 4, "of the failed rank's part, the rest"
    if growth:
        assert ground.trainer.world_size == 3
    else:
        assert max(seen.values()) == 1
    for _ in range(2):
        ground.trainer.train()
        ground.assert_epoch_exact()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_shards_after_a_resume(make: Make, workers: int) -> None:
    ground = make(operator=OfShards)
    ground.trainer.train()
    ground.trained()
    ground.trainer.train(num_steps=7)
    state = ground.trainer.state_dict()
    ground.trainer.train()
    ground.assert_epoch_exact()
    ground.trainer.shutdown()
    other = make(operator=OfShards, num_workers=workers)
    other.trainer.load_state_dict(state)
    before = other.trained()
    other.trainer.train()
    since = other.trained()
    if workers == 3:
        assert before + since == Counter({index: 2 for index in range(240)})
    else:
        assert since == Counter(range(240)), "the epoch begins again"
    other.trainer.train()
    other.assert_epoch_exact()


def test_shards_after_a_resize(make: Make) -> None:
    ground = make(operator=OfShards)
    for workers in (3, 2, 1, 3):
        ground.trainer.resize(workers)
        ground.trainer.train()
        ground.assert_epoch_exact()

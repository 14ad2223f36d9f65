"""Data that is divided among two workers: streams, uneven parts and few batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, random_split

from raysgd.data import Dataset
from raysgd.torch import TorchTrainer
from tests.class_api.operators import Classes, Uneven, data


class Ledger(Classes):
    """Records its rows. A test can replace its loader."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.rows: list[float] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.rows += batch[0][:, 0].tolist()
        return super().train_batch(batch, batch_info)


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=Ledger, num_workers=2, use_gpu=False) as made:
        yield made


def give(trainer: TorchTrainer, count: int, **options: Any) -> list[float]:
    """Train an epoch with another train loader, and return its rows."""

    def exchange(operator: Any) -> None:
        operator.register_data(
            train_loader=DataLoader(data(count), **options), validation_loader=DataLoader(data(101), 8)
        )
        operator.rows.clear()

    trainer.apply_all_operators(exchange)
    return [float(x[0]) for x, _ in data(count)]


def taken(trainer: TorchTrainer) -> list[float]:
    return sorted(row for rows in trainer.apply_all_operators(lambda operator: operator.rows) for row in rows)


@pytest.mark.parametrize(
    ("count", "batches", "shuffle"), [(64, 4, True), (101, 7, False), (65, 5, True), (2, 1, False)]
)
def test_every_row_is_used_once(trainer: TorchTrainer, count: int, batches: int, shuffle: bool) -> None:
    rows = give(trainer, count, batch_size=8, shuffle=shuffle)
    result = trainer.train()
    assert (result["num_samples"], result["batch_count"]) == (count, batches)
    seen = taken(trainer)
    if count == 65:  # one row is left for two ranks: both use it, and it is counted once
        assert len(seen) == 66
        seen = sorted(set(seen))
    assert seen == sorted(rows)


def test_fewer_rows_than_workers(trainer: TorchTrainer) -> None:
    rows = give(trainer, 1, batch_size=8)
    assert trainer.train()["num_samples"] == 1
    assert taken(trainer) == rows * 2
    trainer.apply_all_operators(
        lambda operator: operator.register_data(train_loader=[], validation_loader=DataLoader(data(1)))
    )
    assert trainer.validate()["num_samples"] == 1, "one rank has no part of it, which is allowed"


def test_a_data_set_for_one_call_is_divided(trainer: TorchTrainer) -> None:
    give(trainer, 64, batch_size=8)
    pairs = [(torch.tensor([[float(number), 0.0, 0.0]]), torch.tensor([0])) for number in range(24)]
    dataset = Dataset(pairs, batch_size=3, max_concurrency=1, transform=lambda pair: (pair[0] + 100, pair[1]))
    result = trainer.train(dataset=dataset, num_steps=3)
    assert (result["batch_count"], result["num_samples"]) == (3, 18)
    assert taken(trainer) == [100.0 + number for number in range(18)]
    trainer.train(dataset=dataset, num_steps=1)
    assert taken(trainer) == [100.0 + number for number in range(24)]
    assert trainer.train()["num_samples"] == 64


def test_uneven_streams_end_the_epoch_together(trainer: TorchTrainer) -> None:
    def stream(operator: Any) -> None:
        operator.register_data(train_loader=DataLoader(Uneven(), batch_size=1), validation_loader=[])

    trainer.apply_all_operators(stream)
    first = trainer.train()
    assert (first["batch_count"], first["num_samples"]) == (8, 16)
    second = trainer.train(num_steps=10)
    assert (second["batch_count"], second["epoch"]) == (10, first["epoch"] + 2)
    assert trainer.train()["batch_count"] == 6


class Whole(IterableDataset[Any]):
    """Is not divided: it does not read worker info."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data(40))


def test_ranks_that_do_not_divide_one_data_set_are_named(
    trainer: TorchTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A split without a seed differs between ranks, and a stream that is not divided does not."""

    def register(operator: Any) -> None:
        train, _ = random_split(data(101), [61, 40], torch.Generator().manual_seed(operator.world_rank))
        operator.register_data(train_loader=DataLoader(train, 8), validation_loader=DataLoader(Whole(), 8))

    trainer.apply_all_operators(register)
    caplog.clear()
    assert trainer.train()["num_samples"] == 61 and trainer.validate()["num_samples"] == 80, "of 40"
    trainer.train()
    rows, batch = (each for each in caplog.messages if "rank 0" in each or "ranks 0" in each)
    assert "the train_loader of rank 1 has other rows than that of rank 0 (61 rows with the indices " in rows
    assert "ranks 0 and 1 have begun an epoch with the same batch of the validation_loader: each rank seems to" in batch

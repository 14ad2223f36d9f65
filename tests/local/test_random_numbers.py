"""With `seed=`, random numbers belong to places in the run: dropout and augmentation are those of an undisturbed run, whatever
fails, and those of a loop that seeds for the same places."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

from raysgd import ElasticConfig, TorchTrainer, seed_for
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import train, weights_of

pytestmark = pytest.mark.usefixtures("quiet")

ROWS, BATCH, SEED, EPOCHS = 26, 2, 7, 2


def noise() -> torch.Tensor:
    """Draw from each generator."""
    return torch.tensor([random.gauss(0, 1), numpy.random.normal(), float(torch.randn(()))], dtype=torch.float64)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index, index % 5, 1.0], dtype=torch.float64) / ROWS + noise()
        return x, x.sin().sum(0, keepdim=True)


class ByBatches(Noisy):
    """Has `__getitems__`, which does not iterate over the indices."""

    def __getitems__(self, indices: list[int]) -> Any:
        assert type(indices) is list
        return [self[indices[number]] for number in range(len(indices))]


class Items(Noisy):
    """Its items are batches."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return default_collate([super(Items, self).__getitem__(each) for each in (2 * index, 2 * index + 1)])


def loader(kind: str) -> DataLoader[Any]:
    processes: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3} if kind != "here" else {}
    if kind == "batch sampler":
        return DataLoader(
            Noisy(),
            batch_sampler=BatchSampler(RandomSampler(Noisy(), num_samples=24), BATCH, drop_last=False),
            **processes,
        )
    if kind == "items":
        return DataLoader(Items(), batch_size=None, shuffle=True, **processes)
    data = ByBatches() if kind == "by batches" else Noisy()
    return DataLoader(data, BATCH, shuffle=True, persistent_workers=kind == "persistent", **processes)


KINDS = ("here", "processes", "persistent", "by batches", "batch sampler", "items")


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x + 0.1 * noise()), y)


class Drawing(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer = made()
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        kind = config.get("kind", "here")
        self.register_data(train_loader=loader(kind), validation_loader=loader(kind))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.step()
        return {"train_loss": loss, "num_samples": len(batch[0])}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": loss_of(self.model, batch), "num_samples": len(batch[0])}


def trainer(workers: int, *, grow: bool = False, kind: str = "here", seed: int | None = SEED) -> TorchTrainer:
    elastic = ElasticConfig(hang_timeout_s=60, snapshot_every=1, grow=grow)
    return TorchTrainer(
        training_operator_cls=Drawing,
        num_workers=workers,
        use_gpu=False,
        seed=seed,
        config={"kind": kind},
        elastic=elastic,
    )


def undisturbed(workers: int, kind: str = "here") -> torch.Tensor:
    with Cluster(), trainer(workers, kind=kind) as run:
        for _ in run.epochs(EPOCHS):
            run.train()
            run.validate()
        return weights_of(run)


def by_hand(workers: int, kind: str = "here") -> torch.Tensor:
    """Train the parts of so many workers one after the other, in a loop of our own."""
    torch.manual_seed(SEED)
    model, optimizer = made()
    data, own_batches = Items() if kind == "items" else Noisy(), kind == "batch sampler"
    for epoch in range(1, EPOCHS + 1):
        seed_for(SEED, epoch=epoch)
        size = 1 if kind == "items" else BATCH
        units = [each.tolist() for each in DataLoader(range(len(data)), size, shuffle=True)][
            : 12 if own_batches else None
        ]  # type: ignore[arg-type, var-annotated]
        order = units if own_batches else [each for batch in units for each in batch]
        unit = 1 if own_batches else size
        for start in range(0, len(order), unit * workers):
            optimizer.zero_grad()
            for at, stop in parts(start, min(start + unit * workers, len(order)), workers):
                indices = [index for batch in order[at:stop] for index in batch] if own_batches else order[at:stop]
                seed_for(SEED, epoch=epoch, offset=at, reading=True)
                batch = data[indices[0]] if kind == "items" else default_collate([data[each] for each in indices])
                seed_for(SEED, epoch=epoch, offset=at)
                rows = (stop - at) / (min(start + unit * workers, len(order)) - start)
                (loss_of(model, batch) * rows).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def parts(start: int, stop: int, workers: int) -> Iterator[tuple[int, int]]:
    base, extra = divmod(stop - start, workers)
    for worker in range(workers):
        size = base + (worker < extra)
        if size:
            yield start, start + size
        start += size


def assert_equal(found: torch.Tensor, expected: torch.Tensor, workers: int) -> None:
    """Compare bits of up to two parts, which are rounded alike in any order."""
    assert torch.equal(found, expected) if workers <= 2 else torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("workers", "kind"), [(1, "here"), (4, "here"), *((2, kind) for kind in KINDS)])
def test_a_loop_by_hand_with_the_same_places_ends_with_the_same_weights(workers: int, kind: str) -> None:
    assert_equal(undisturbed(workers, kind), by_hand(workers, kind), workers)


FEWER = [*((*pair, "here") for pair in ((2, 1), (4, 1), (4, 2), (4, 3))), (2, 1, "persistent"), (4, 3, "processes")]


@pytest.mark.parametrize(("workers", "left", "kind"), FEWER)
def test_fewer_workers_draw_for_the_parts_of_all(workers: int, left: int, kind: str) -> None:
    config = {"kind": kind}
    given: dict[str, Any] = {"num_workers": workers, "batch": "auto", "seed": SEED, "scheduler_step_freq": "manual"}
    expected = train(Drawing, config, [(None, workers)], **given)
    for schedule in ([(1, workers), (None, left)], [(1, workers), (1, left), (None, workers)]):
        assert_equal(train(Drawing, config, schedule, **given), expected, workers)


def test_validations_draw_the_same_on_any_number_of_workers() -> None:
    found = []
    for workers in (1, 2):
        with Cluster(), trainer(workers) as run:
            found.append(run.validate(num_steps=12 // workers)["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_run_without_a_seed_says_once_that_numbers_are_drawn_anew(
    seed: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("raysgd").disabled = False
    with Cluster([Fault("kill", "reduced", rank=1, step=3)]), trainer(2, grow=True, seed=seed) as run:
        run.train()
        run.resize(2)  # waits for the replacement worker
        run.save(tmp_path / "one.pt")
        run.load(tmp_path / "one.pt")
        run.load(tmp_path / "one.pt")
        run.train(num_steps=1)
    with Cluster(), trainer(2, seed=seed) as run:
        run.load(tmp_path / "one.pt")
        run.validate(num_steps=1)
        assert len([each for each in caplog.messages if "this run has no seed" in each]) == (seed is None)
        run.train(num_steps=1)
        run.train(num_steps=1)
    with Cluster([Fault("kill", "reduced", rank=1, step=3)]), trainer(2, seed=seed) as run:
        run.train()  # in which one worker draws for two
    said = [each for each in caplog.messages if "this run has no seed" in each]
    changed = "the workers or the script have changed"
    assert [each.partition(" from here on ")[2] for each in said] == (
        [f"({changed})", "(a state was loaded)", f"({changed})"] if seed is None else []
    )


def test_a_run_without_a_seed_seeds_nothing() -> None:
    def seed(_: Any) -> int:
        return torch.initial_seed()

    with Cluster(), trainer(2, seed=None) as run:
        before = run.apply_all_operators(seed)
        run.train(num_steps=2)
        run.validate(num_steps=1)
        assert run.apply_all_operators(seed) == before

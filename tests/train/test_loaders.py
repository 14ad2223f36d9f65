"""The passes of prepared loaders belong to the run."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from raysgd import train
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.session_functions import Stopped
from tests.replicas import FunctionRank

DATA = TensorDataset(torch.arange(24))
PASSES = 5


class Reporting(FunctionRank):
    """Has the newest checkpoint as bytes."""

    payload: bytes | None = None

    def _deliver(self, message: Any, body: Any) -> None:
        if message.has_checkpoint:
            self.payload = bytes(body[message.metrics_size :])


def rows(batches: Any) -> list[int]:
    return [int(row) for (batch,) in batches for row in batch]


def save(epoch: int, folder: Path | None) -> None:
    if folder is None:
        train.report({}, checkpoint=train.Checkpoint.from_dict({"epoch": epoch}))
    else:
        (folder / "epoch").write_text(str(epoch))
        train.report({}, checkpoint=train.Checkpoint.from_directory(folder))


def next_epoch() -> int:
    found = train.get_checkpoint()
    if found is None:
        return 0
    if found.get_internal_representation()[0] == "data_dict":
        return int(found.to_dict()["epoch"]) + 1
    return int(Path(str(found.path), "epoch").read_text()) + 1


def prepared(**options: Any) -> Any:
    return train.torch.prepare_data_loader(DataLoader(DATA, **{"batch_size": 3, "shuffle": True, **options}))


Passes = Callable[[Any, int, Callable[[], None]], list[int]]


def whole(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    found = rows(loader)
    at_end()
    return found


def ended_early(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    found = rows(itertools.islice(loader, 2))
    for _ in loader:
        break
    at_end()
    return found


def counted(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    """Save in the last batch, as a loop does that counts them."""
    found: list[int] = []
    for number, (batch,) in enumerate(loader, start=1):
        found += [int(row) for row in batch]
        if number == len(loader):
            at_end()
    return found


def with_own_epochs(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    loader.sampler.set_epoch(2 * (PASSES - epoch))
    return whole(loader, epoch, at_end)


class Run:
    """A function on one of the ranks, which is stopped in the middle of some passes."""

    def __init__(self, passes: Passes, stops: tuple[int, ...], folder: Path | None = None, **options: Any) -> None:
        self.passes, self.stops, self.folder, self.options = passes, [*stops], folder, options
        self.orders: dict[int, list[int]] = {}

    def __call__(self) -> None:
        torch.manual_seed(0)
        loader = prepared(**self.options)
        for epoch in range(next_epoch(), PASSES):
            if epoch in self.stops:
                self.stops.remove(epoch)
                next(iter(loader))
                raise Stopped(asked=False)
            self.orders[epoch] = self.passes(loader, epoch, lambda epoch=epoch: save(epoch, self.folder))  # type: ignore[misc]

    def all_attempts(self, ranks: int = 2, later: int = 2, **attempt: Any) -> list[list[int]]:
        payload, number = None, 0
        while number <= 3 and len(self.orders) < PASSES:
            number += 1
            rank = Reporting(0, ranks if number == 1 else later)
            rank.run(self, checkpoint=payload, number=number, **attempt)
            payload = rank.payload or payload
            rank.close()
        return [self.orders[epoch] for epoch in range(PASSES)]


@pytest.mark.parametrize("kind", ["dictionary", "folder"])
@pytest.mark.parametrize("passes", [whole, ended_early, counted, with_own_epochs])
def test_a_function_that_continues_from_a_checkpoint_has_the_orders_of_the_run(
    passes: Passes, kind: str, tmp_path: Path
) -> None:
    folder = None if kind == "dictionary" else tmp_path
    undisturbed = Run(passes, (), folder).all_attempts()
    assert Run(passes, (3, 4), folder).all_attempts() == undisturbed
    assert len({*map(tuple, undisturbed)}) == PASSES
    if folder is not None:
        assert [each.name for each in folder.iterdir()] == ["epoch"], "the user's folder stays as it is"


def test_the_last_worker_of_several_has_their_orders() -> None:
    alone = Run(whole, (3,)).all_attempts(later=1, workers=2)
    assert [alone[each][::2] for each in (3, 4)] == Run(whole, ()).all_attempts()[3:]


ONE: dict[str, Callable[[], dict[str, Any]]] = {
    "of torch's generator": dict,
    "of its own generator": lambda: {"generator": torch.Generator().manual_seed(1)},
    "weighted": lambda: {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 24, 24)},
}


@pytest.mark.parametrize("kind", ONE)
def test_one_worker_does_not_draw_the_same_orders_again(kind: str) -> None:
    class Fresh(Run):
        def __call__(self) -> None:
            self.options = ONE[kind]()
            super().__call__()

    orders = Fresh(whole, (3,)).all_attempts(ranks=1, later=1)
    assert len({*map(tuple, orders)}) == PASSES
    assert orders[:3] == Fresh(whole, ()).all_attempts(ranks=1)[:3]


def test_a_sampler_within_a_batch_sampler_has_another_order_in_each_pass() -> None:
    class Fresh(Run):
        def __call__(self) -> None:
            sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
            batches = BatchSampler(sampler, 3, drop_last=False)
            self.options = {"batch_size": 1, "shuffle": False, "batch_sampler": batches}
            super().__call__()

    assert Fresh(whole, (3,)).all_attempts() == Fresh(whole, ()).all_attempts()


@pytest.mark.parametrize("saved", [None, 1])
def test_two_loaders_have_counts_of_their_own(saved: int | None) -> None:
    """The second one makes two passes in each epoch, and a checkpoint comes within the first pass."""
    orders: list[Any] = []

    def function(stop: int) -> None:
        loaders, others = prepared(), prepared(batch_size=2)
        for epoch in range(next_epoch(), PASSES):
            first = iter(loaders)
            batch = rows([next(first)])
            if epoch - 1 == saved:
                save(saved, None)
            if epoch == stop:
                raise Stopped(asked=False)
            orders.append((epoch, batch + rows(first), rows(others), rows(others)))

    rank = Reporting(0, 2)
    rank.run(function, -1)
    undisturbed, orders = orders, []
    rank.run(function, 2)
    rank.run(function, -1, checkpoint=rank.payload, number=2)
    expected = undisturbed[:2] + undisturbed[0 if saved is None else 2 :]
    assert orders == expected


def test_a_function_that_continues_from_a_commit_has_the_orders_of_the_run() -> None:
    orders: list[Any] = []

    def function(stop: int) -> None:
        loader, state = prepared(), train.elastic({"epoch": 0})
        while state["epoch"] < PASSES:
            if state["epoch"] == stop:
                next(iter(loader))
                raise Stopped(asked=False)
            orders.append(rows(loader))
            state["epoch"] += 1
            state.commit()

    FunctionRank(0, 2).run(function, -1)
    undisturbed, orders = orders, []
    first, replacement = FunctionRank(0, 2), FunctionRank(0, 2)
    first.run(function, 3)
    replacement.load(first.state())
    replacement.run(function, -1, number=2)
    assert orders == undisturbed


@pytest.mark.parametrize("kind", ["dictionary", "folder"])
def test_a_stored_checkpoint_has_the_count_of_passes(kind: str, tmp_path: Path) -> None:
    """As another script and `fit()` load it, also after the function has reported it once more."""
    folder = None if kind == "dictionary" else tmp_path / "own"
    if folder is not None:
        folder.mkdir()
    undisturbed = Run(whole, (), folder).all_attempts()
    first, again = Run(whole, (3,), folder), Run(whole, (), folder)
    rank, manager = Reporting(0, 2), CheckpointManager(tmp_path / "kept")
    rank.run(first)
    for number in range(1, 3):
        assert rank.payload is not None
        manager.store(number, rank.payload, {})
        stored = train.Checkpoint(manager.place_of(number))
        rank.run(lambda stored=stored: train.report({}, checkpoint=stored))
    rank.run(again, checkpoint=stored.to_bytes(), run=2)
    assert [again.orders[each] for each in (3, 4)] == undisturbed[3:]

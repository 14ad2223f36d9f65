"""The rows that evaluations with `num_steps` take, on any number of workers: those of a loop by hand over batches of all workers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd.torch.settings import TorchSettings
from tests.replicas import OperatorRank, torch_rank
from tests.tiers import NIGHTLY
from tests.torch.small import Line, Numbers

WORKERS, ROWS, SIZES, STEPS = range(1, 6), range(1, 41), range(1, 6), range(1, 10)
SOME = {"rows": [1, 2, 3, 7, 11, 24, 40], "sizes": [1, 2, 5], "steps": [1, 3, 9]}
EVERY = {"rows": [*ROWS], "sizes": [*SIZES], "steps": [*STEPS]}


def loader_of(rows: int, size: int, *, shuffled: bool) -> DataLoader[int]:
    return DataLoader(Numbers(rows), size, shuffle=shuffled, generator=torch.Generator().manual_seed(7))


class Noting(Line):
    """Notes each row with its place: the pass, and where it is in the order of that."""

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        self.taken: list[tuple[int, int, int]] = []
        return {"validation_loader": loader_of(config["rows"], config["size"], shuffled=config["shuffled"])}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        feed = self._internals.feed
        self.taken += [(feed.epoch, feed.step.current.first + n, int(row)) for n, row in enumerate(batch)]
        return {"val": batch.double().mean()}


class Ranks:
    """The ranks of one run, each alone in this process."""

    def __init__(self, workers: int, **config: Any) -> None:
        self.ranks = [torch_rank(Noting, config, rank, workers) for rank in range(workers)]
        self.places: list[Any] = []
        self.calls = 0

    def take(self, steps: int, *, continues: bool) -> list[int]:
        """Return the rows of a validation, in the order of the data."""
        self.calls += 1
        given = {"continues": continues, "places": self.places}
        with pytest.MonkeyPatch.context() as patched:  # all draw the same, and do not have to agree
            patched.setattr(TorchSettings, "distributed", True)
            patched.setattr("raysgd.torch.data.sampling.agree", lambda order, recipe, first: (order, recipe))
            self.places = [place(rank, self.calls, steps, **given) for rank in self.ranks]
        taken = sorted(each for rank in self.ranks for each in rank.operator.taken)
        for rank in self.ranks:
            rank.operator.taken.clear()
        return [row for *_, row in taken]


def place(rank: OperatorRank, *given: Any, **more: Any) -> Any:
    rank.validate(*given, **more)
    return rank.measured.place


class ByHand:
    """A loop without raysgd over batches that have the rows of all workers."""

    def __init__(self, workers: int, *, rows: int, size: int, shuffled: bool) -> None:
        self._loader = loader_of(rows, size * workers, shuffled=shuffled)
        self._iterator: Iterator[Any] | None = None

    def take(self, steps: int, *, continues: bool) -> list[int]:
        found: list[int] = []
        self._iterator = self._iterator if continues else None
        for _ in range(steps):
            batch = None if self._iterator is None else next(self._iterator, None)
            if batch is None:
                self._iterator = iter([*self._loader])  # a pass that is left early would draw less
                batch = next(self._iterator)
            found += batch.tolist()
        self._iterator = self._iterator if continues else None
        return found


@pytest.mark.timeout(3000 if NIGHTLY else 300)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_any_number_of_steps_has_the_rows_of_a_loop_by_hand(workers: int, shuffled: bool) -> None:
    """Each number of steps is tried alone, as `fit(validation_steps=)` does, and after all those before it."""
    grid, differ, cases = EVERY if NIGHTLY else SOME, [], 0
    for rows in grid["rows"]:
        for size in grid["sizes"]:
            config: dict[str, Any] = {"rows": rows, "size": size, "shuffled": shuffled}
            ranks, by_hand = Ranks(workers, **config), ByHand(workers, **config)
            for continues in (False, True):
                for steps in grid["steps"]:
                    cases += 1
                    if ranks.take(steps, continues=continues) != by_hand.take(steps, continues=continues):
                        differ.append((rows, size, steps, continues))
    assert not differ, f"{len(differ)} of {cases} differ: {differ[:5]}"

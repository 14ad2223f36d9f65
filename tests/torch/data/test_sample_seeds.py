"""Random numbers of a sample depend on the seed, the epoch and the index, whichever rank or process handles the sample."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from raysgd import ConfigError, TorchTrainer
from raysgd.data import SampleSeeds
from tests.replicas import torch_rank
from tests.torch.data.sources import PlannedSource, begin, epoch_of
from tests.torch.data.sources import drawn as drawn_from
from tests.torch.small import Recording, inline, operator_of
from tests.torch.test_seed import Augmented, Noisy

Drawn = dict[int, list[float]]


class Seeded(Augmented):
    """Trains on seeded samples. Each batch in `seen` is one of the data set, and what `sample_rng` gives for its samples."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        processes = config.get("processes", 0)
        loader: Any = DataLoader(
            SampleSeeds(Noisy(), seed=3), 2, shuffle=True, num_workers=processes, persistent_workers=processes > 0
        )
        self.register_data(train_loader=loader)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        own = []
        for index in batch[:, 0].long():
            with self.sample_rng(index):
                own.append([float(torch.rand(())), random.random(), float(numpy.random.random())])
        self.seen[-1] = torch.cat([batch[:, :4], torch.tensor(own, dtype=torch.float64)], dim=1)
        return result


def drawn(batches: list[torch.Tensor]) -> Drawn:
    """Return the numbers of each sample."""
    return {int(row[0]): row[1:].tolist() for batch in batches for row in batch}


def epochs_of(trainer: TorchTrainer) -> list[Drawn]:
    """Train two epochs. Return what all workers have seen in each."""
    found = []
    for _ in range(2):
        trainer.train()
        seen = trainer.apply_all_operators(lambda operator: (list(operator.seen), operator.seen.clear())[0])
        found.append(drawn([batch for rank in seen for batch in rank]))
    return found


@pytest.fixture(scope="module")
def expected() -> list[Drawn]:
    """What one worker without loader processes sees."""
    with inline(Seeded, seed=7) as trainer:
        return epochs_of(trainer)


def test_epochs_and_samples_differ(expected: list[Drawn]) -> None:
    first, second = expected
    assert sorted(first) == sorted(second) == list(range(12))
    numbers = [number for epoch in expected for row in epoch.values() for number in row]
    assert len(set(numbers)) == len(numbers) == 2 * 12 * 6


def test_loader_processes_that_persist_draw_the_same(expected: list[Drawn]) -> None:
    with inline(Seeded, seed=7, config={"processes": 2}) as trainer:
        assert epochs_of(trainer) == expected


def test_three_ranks_draw_the_same(expected: list[Drawn]) -> None:
    ranks = [torch_rank(Seeded, {}, rank, 3, seed=7) for rank in range(3)]
    for call in range(2):
        for rank in ranks:
            rank.operator.seen.clear()
            rank.train(call)
        assert drawn([batch for rank in ranks for batch in rank.operator.seen]) == expected[call]


def test_a_replacement_in_the_middle_of_an_epoch_draws_the_numbers_of_that_epoch(expected: list[Drawn]) -> None:
    survivor, replacement = torch_rank(Seeded, seed=7), torch_rank(Seeded, seed=7)
    survivor.train(0)
    survivor.train(1, 2)
    replacement.load(survivor.state())
    replacement.train(2)
    rest = drawn(replacement.operator.seen)
    assert len(rest) == 12 - 2 * 2 and rest.items() <= expected[1].items()


def test_global_generators_continue_as_if_nothing_had_been_drawn() -> None:
    def numbers() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.random())]

    data = SampleSeeds(Noisy(), seed=0)
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    following = numbers()
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    first = data[5]
    assert numbers() == following
    assert torch.equal(data[torch.tensor(5)], first) and torch.equal(data[numpy.int64(5)], first)
    assert not torch.equal(SampleSeeds(Noisy(), seed=1)[5], first)


def test_what_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(ConfigError, match="seeds each sample by its index, and got"):
        SampleSeeds(iter([1, 2]), seed=0)
    with inline(Seeded) as trainer, pytest.raises(ConfigError, match="pass seed="):
        operator_of(trainer).sample_rng(0)


def test_a_subset_and_a_concatenation_pass_the_epoch_on() -> None:
    seeded = SampleSeeds(Noisy(), seed=7)
    for data in (Subset(seeded, [0, 1]), ConcatDataset([seeded]), ConcatDataset([Subset(seeded, [0, 1])])):
        with inline(Recording, config={"loader": lambda data=data: DataLoader(data)}) as trainer:
            count = trainer.train()["batch_count"]
            trainer.train()
            (first, *_), (second, *_) = (operator_of(trainer).seen[place][0] for place in (0, count))
            assert first == second == 0, "the same sample"
            assert operator_of(trainer).seen[0] != operator_of(trainer).seen[count]


def test_a_source_of_the_same_data_does_not_change_the_epoch_of_the_other() -> None:
    seeded = SampleSeeds(Noisy(), seed=7)
    training, validation = (PlannedSource(DataLoader(Subset(seeded, part)), pad=True) for part in ([0, 1], [2]))

    def numbers(epoch: int, *, validates: bool) -> list[list[float]]:
        begin(training, epoch)
        found = [next(drawn_from(training)).batch]
        if validates:
            epoch_of(validation, epoch=epoch + 5)
        return [batch.tolist() for batch in [*found, *(each.batch for each in drawn_from(training, 1))]]

    alone = [numbers(epoch, validates=False) for epoch in (0, 1)]
    assert [numbers(epoch, validates=True) for epoch in (0, 1)] == alone

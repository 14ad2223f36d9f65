"""`seed=` repeats a run bit by bit: weights, order and augmentation, also after a load between two epochs."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from raysgd import ConfigError
from raysgd.torch import TrainingOperator
from tests.replicas import OperatorRank, torch_rank
from tests.torch.small import inline, operator_of, weights


class Noisy(Dataset[Any]):
    """Item i is i, a random number of each generator, and the number of the loader process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.random())]
        return torch.tensor([index, *drawn, -1 if info is None else info.id], dtype=torch.float64)


class Augmented(TrainingOperator):
    """Keeps its batches in `seen`. Its weights depend on every number that is drawn."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        loader: Any = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=config.get("processes", 0))
        self.register_data(train_loader=loader, validation_loader=loader)
        self.seen: list[torch.Tensor] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(batch)
        self.zero_grad()
        self.backward(self.model(batch[:, 1:4]).square().sum())
        self.step()
        return {"num_samples": len(batch)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"num_samples": len(batch), "val_drawn": float(batch[:, 1:4].sum()) + random.random()}


def trained(seed: int | None, epochs: int = 2, *, validate: bool = False, **config: Any) -> torch.Tensor:
    with inline(Augmented, config=config, seed=seed) as trainer:
        for _ in range(epochs):
            trainer.train()
            if validate:
                trainer.validate()
        return weights(trainer)


def test_two_runs_end_with_the_same_bits() -> None:
    first = trained(7)
    torch.rand(3), random.random()  # what else happens in this process does not matter
    assert torch.equal(trained(7), first)
    assert not torch.equal(trained(8), first)
    assert torch.equal(trained(7, validate=True), first), "a validation has changed the training"


def test_without_a_seed_runs_differ() -> None:
    assert not torch.equal(trained(None), trained(None))


def test_setup_draws_what_a_script_with_this_seed_draws() -> None:
    with inline(Augmented, seed=5) as trainer:
        torch.manual_seed(5)
        expected = nn.Linear(3, 4).double().weight
        assert torch.equal(operator_of(trainer).model[0].weight, expected)


@pytest.mark.parametrize("processes", [0, 2])
def test_in_the_middle_of_an_epoch_the_numbers_continue(tmp_path: Path, processes: int) -> None:
    path, config = str(tmp_path / "half.pt"), {"processes": processes}
    with inline(Augmented, config=config, seed=7) as trainer:
        trainer.train(num_steps=2)
        trainer.save(path)
    with inline(Augmented, config=config, seed=7) as trainer:
        trainer.load(path)
        trainer.fit(2, validate_every=0)
        assert torch.equal(weights(trainer), trained(7))


def test_validations_repeat_their_numbers_too() -> None:
    def validations() -> list[float]:
        with inline(Augmented, seed=3) as trainer:
            return [trainer.validate()["val_drawn"] for _ in range(2)]

    first = validations()
    assert validations() == first and first[0] != first[1]


# -- several ranks, without Ray --------------------------------------------------------------------------


def replica(rank: int, ranks: int, **config: Any) -> OperatorRank:
    return torch_rank(Augmented, config, rank, ranks, seed=7)


def epoch(one: OperatorRank, call: int = 1) -> torch.Tensor:
    one.operator.seen.clear()
    one.train(call)
    return torch.cat(one.operator.seen)


@pytest.mark.parametrize("processes", [0, 2])
def test_ranks_and_loader_processes_draw_different_numbers(processes: int) -> None:
    ranks = [replica(rank, 2, processes=processes) for rank in range(2)]
    first, second = (parts.operator.model.state_dict() for parts in ranks)
    assert all(torch.equal(value, second[name]) for name, value in first.items()), "the models begin alike"
    drawn = torch.cat([epoch(each) for each in ranks])
    assert sorted(drawn[:, 0].tolist()) == list(range(12)), "every sample is used once"
    assert len(drawn[:, 1:4].unique()) == 36
    assert torch.equal(in_order(drawn), in_order(epoch(replica(0, 1)))), "as on one worker"
    assert drawn[:, 4].unique().tolist() == ([0, 1] if processes else [-1])


def test_the_order_is_the_same_for_any_number_of_workers() -> None:
    alone = epoch(replica(0, 1))[:, 0].reshape(-1, 6).tolist()
    two = [epoch(replica(rank, 2))[:, 0].reshape(-1, 3).tolist() for rank in range(2)]
    assert [[*first, *second] for first, second in zip(*two, strict=True)] == alone
    assert alone != sorted(alone)


def in_order(samples: torch.Tensor) -> torch.Tensor:
    return samples[samples[:, 0].argsort()][:, :4]


class LeftBehind(Augmented):
    """Fails in one step, in which it has drawn numbers: because its peer has left, as `stops` says, or by itself."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.config.get("fails") == batch_info["global_step"] and not self.config.get("failed"):
            self.config["failed"] = True
            self.model(batch[:, 1:4]), random.random(), numpy.random.random()
            self.config["stops"]()
            raise ConnectionError("the peer has left")
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_step_that_one_rank_has_begun_when_the_script_died_draws_the_same_again(step: int) -> None:
    """Also the first steps of two epochs, which seed the generators."""

    def make(**config: Any) -> OperatorRank:
        return torch_rank(LeftBehind, config, 1, 2, seed=7)

    undisturbed, left = make(), make(fails=step)
    whole = [epoch(undisturbed, call) for call in (1, 2)]
    left.operator.config["stops"] = left.interrupt
    left.outlive_driver()
    with pytest.raises(ConnectionError):
        for call in (1, 2):
            epoch(left, call)
    again = left.taken_over(make)
    assert torch.equal(torch.cat([*left.operator.seen, epoch(again, call)]), whole[call - 1])
    assert call == 2 or torch.equal(epoch(again, 2), whole[1])
    assert all(map(torch.equal, again.operator.model.parameters(), undisturbed.operator.model.parameters()))


def test_what_is_no_seed_is_refused() -> None:
    for seed in (-1, 2**63, 1.0, True):
        with pytest.raises(ConfigError, match="seed must be a whole number from 0 to 9223372036854775807, or None"):
            inline(seed=seed)

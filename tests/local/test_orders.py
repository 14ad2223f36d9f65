"""Orders of epochs, and what is drawn for them, when workers fail: those of an undisturbed run, and never one twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault

ROWS, EPOCHS = 18, 6


class Sampler(RandomSampler):
    """Names a point of the worker after each draw."""

    def __iter__(self) -> Iterator[int]:
        drawn = list(super().__iter__())
        if Cluster.running._has_group():
            Cluster.running.point("drawn")
        return iter(drawn)


class Orders(TrainingOperator):
    """Notes the samples of each epoch in their order. With `config["own"]`, its loader has an own generator."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=nn.MSELoss()
        )
        data = TensorDataset(torch.arange(float(ROWS)).unsqueeze(1), torch.zeros(ROWS, 1))
        generator = torch.Generator().manual_seed(5) if config.get("own") else None
        sampler = Sampler(data, generator=generator)
        loader = DataLoader(data, batch_size=1, sampler=sampler, generator=generator)
        self.register_data(train_loader=loader, validation_loader=DataLoader(data, batch_size=1))
        self.seen: list[list[int]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        own = (
            batch[0][:, 0].int().tolist() if self._internals.feed.step.current.fresh else []
        )  # and none that is repeated
        rows = [row for part in Cluster.running.together(own) for row in part]
        if not self.seen or len(self.seen[-1]) == ROWS:
            self.seen.append([])
        result = super().train_batch(batch, batch_info)
        self.seen[-1] += rows
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.point("validate")
        return super().validate_batch(batch, batch_info)

    def state_dict(self) -> Any:
        return [list(each) for each in self.seen]

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = [list(each) for each in state_dict]


def train(trainer: TorchTrainer, epoch: int) -> None:
    trainer.train()
    trainer.validate()


def orders(
    faults: Sequence[Fault], each: Callable[[TorchTrainer, int], None] = train, *, own: bool = False, grow: bool = False
) -> list[tuple[int, ...]]:
    with Cluster(faults) as cluster:
        # Each worker has one part, so that the samples of a step come in their order.
        elastic = ElasticConfig(batch="per_worker", grow=grow, hang_timeout_s=60)
        options: dict[str, Any] = {"num_workers": 3, "use_ray": True, "use_gpu": False, "elastic": elastic}
        with TorchTrainer(training_operator_cls=Orders, config={"own": own}, **options) as trainer:
            for epoch in range(EPOCHS):
                each(trainer, epoch)
            assert not cluster.left
            seen = trainer.apply_all_operators(lambda operator: operator.seen)[0]
    assert [sorted(epoch) for epoch in seen] == [[*range(ROWS)]] * EPOCHS
    return [tuple(epoch) for epoch in seen]


@cache
def undisturbed(own: bool) -> list[tuple[int, ...]]:
    return orders([], own=own)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("at", "step"), [("drawn", 0), ("drawn", 7), ("drawn", 13), ("validate", 1), ("validate", 4)])
def test_a_failure_changes_no_order(own: bool, rank: int, at: str, step: int) -> None:
    """It strikes while an order is agreed on, or in a validation."""
    assert orders([Fault("kill", at, rank, step)], own=own) == undisturbed(own)


def test_ranks_that_are_replaced_one_after_another_repeat_no_order() -> None:
    def replaced(trainer: TorchTrainer, epoch: int) -> None:
        trainer.train()
        Cluster.running.workers[0].die("SIGKILL")
        trainer.validate()
        trainer.resize(3)

    found = orders([], replaced, grow=True)
    assert len(set(found)) == EPOCHS and found[:1] == undisturbed(False)[:1]


def test_new_workers_after_all_have_failed_repeat_no_order() -> None:
    def failed(trainer: TorchTrainer, epoch: int) -> None:
        trainer.train()
        for worker in Cluster.running.workers:
            worker.die("SIGKILL")

    assert len(set(orders([], failed, grow=True))) == EPOCHS


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1, 2)])
def test_parameters_that_were_frozen_between_calls_stay_frozen(victims: Sequence[int]) -> None:
    def freeze(operator: Any) -> None:
        operator.model.bias.requires_grad_(False)

    with Cluster() as cluster:
        options: dict[str, Any] = {"num_workers": 3, "use_ray": True, "use_gpu": False}
        with TorchTrainer(training_operator_cls=Orders, elastic=ElasticConfig(hang_timeout_s=60), **options) as trainer:
            trainer.train()
            trainer.apply_all_operators(freeze)
            trainer.train(num_steps=1)
            for worker in [cluster.workers[rank] for rank in victims]:
                worker.die("SIGKILL")
            trainer.validate()
            trainer.resize(3)
            trainer.train()
            found = trainer.apply_all_operators(lambda operator: operator.model.bias.requires_grad)
    assert found == [False] * 3

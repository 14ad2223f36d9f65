"""Calls beside the batches that change the state: each is made once, whichever worker fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingFailedError
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault

Found = tuple[list[float], list[float], list[float]]  # weights, rates, weight decays


class Plateau(TrainingOperator):
    """The rate is halved by each update that is not better."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=schedule
        )
        x = torch.randn(24, 2, generator=torch.Generator().manual_seed(2)).double()
        self.register_data(train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        all_die((self._position.call_epoch, batch_info["batch_idx"]))
        return super().train_batch(batch, batch_info)

    @property
    def _position(self) -> Any:
        return self._internals.feed.position


def all_die(place: Any) -> None:
    """End all workers at the first place in the notes of the cluster, once."""
    cluster = Cluster.running
    if cluster.notes[:1] == [place]:
        del cluster.notes[0]
        for worker in cluster.workers:
            if worker is not cluster.here:
                worker.die("SIGKILL")
        cluster.hit("kill")


def started(workers: int, every: Any = "epoch") -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Plateau,
        num_workers=workers,
        use_ray=True,
        use_gpu=False,
        scheduler_step_freq="manual",
        elastic=ElasticConfig(grow=False, hang_timeout_s=60, snapshot_every=every),
    )


def changed(operator: Any) -> None:
    """Change weights and settings: what a script does between two calls."""
    Cluster.running.point("changing")
    with torch.no_grad():
        operator.model.weight += 1.0
    operator.optimizer.param_groups[0]["lr"] *= 0.5
    operator.optimizer.param_groups[0]["weight_decay"] += 0.25
    Cluster.running.point("changed")


def state(operator: Any) -> tuple[list[float], float, float]:
    (group,) = operator.optimizer.param_groups
    return nn.utils.parameters_to_vector(operator.model.parameters()).tolist(), group["lr"], group["weight_decay"]


def outcome(
    workers: int,
    script: Callable[[TorchTrainer], Any],
    faults: Sequence[Fault] = (),
    all_die_at: Sequence[Any] = (),
    **given: Any,
) -> Any:
    """Return the state after a script, which is the same on all ranks, and the reasons of the recoveries."""
    with Cluster(faults) as cluster, started(workers, **given) as trainer:
        cluster.notes += all_die_at
        script(trainer)
        assert not cluster.left and not cluster.notes
        first, *others = trainer.apply_all_operators(state)
        assert all(each == first for each in others)
        return first, [each.reason for each in trainer.recoveries]


def between_calls(trainer: TorchTrainer) -> None:
    trainer.train()
    trainer.update_scheduler(1.0)
    trainer.update_scheduler(1.0)
    trainer.train()
    trainer.apply_all_operators(changed)
    trainer.train()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("every", ["epoch", 1, None])
@pytest.mark.parametrize("places", [[(2, 0)], [(2, 2)], [(3, 0)], [(3, 2)], [(1, 1), (3, 1)]])
def test_a_change_between_calls_is_kept_if_all_workers_fail_in_the_next_one(
    workers: int, every: Any, places: list[Any]
) -> None:
    expected, none = outcome(workers, between_calls)
    found, reasons = outcome(workers, between_calls, all_die_at=places, every=every)
    assert found[1:] == expected[1:] and found[0] == pytest.approx(expected[0], rel=1e-9)
    assert none == [] and set(reasons) == {"worker death"}


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("at", ["changing", "changed"])
def test_a_change_in_which_workers_fail_is_made_once(ranks: Sequence[int], at: str) -> None:
    expected, _ = outcome(2, between_calls)
    found, reasons = outcome(2, between_calls, [Fault("kill", at, rank) for rank in ranks])
    assert found[1:] == expected[1:] and len(reasons) == 1


def with_a_collective_call(trainer: TorchTrainer) -> None:
    def function(operator: Any) -> None:
        operator.optimizer.param_groups[0]["lr"] *= 0.5
        Cluster.running.point("before")
        dist.barrier()
        Cluster.running.point("after")
        operator.optimizer.param_groups[0]["weight_decay"] += 0.25

    trainer.train()
    trainer.apply_all_operators(function)
    trainer.train()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("at", ["before", "after"])
def test_a_function_with_a_collective_call_in_which_a_worker_fails_acts_once(rank: int, at: str) -> None:
    expected, _ = outcome(3, with_a_collective_call)
    found, reasons = outcome(3, with_a_collective_call, [Fault("kill", at, rank)])
    assert found[1:] == expected[1:] == (0.05, 0.25) and reasons == ["worker death"]


def test_without_a_snapshot_such_a_function_is_not_called_again() -> None:
    def script(trainer: TorchTrainer) -> None:
        with pytest.raises(TrainingFailedError, match=r"a collective call on ranks 0, 1\. .* does not call it again"):
            with_a_collective_call(trainer)
        trainer.train()

    found, _ = outcome(3, script, [Fault("kill", "before", 2)], every=None)
    assert found[1:] == (0.05, 0.0)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("every", ["epoch", None])
def test_the_rank_whose_function_has_raised_an_error_fails_later(every: Any, trained: bool) -> None:
    """The others are left with what their own calls of that function have done, until its error came."""

    def function(operator: Any) -> None:
        operator.optimizer.param_groups[0]["lr"] *= 0.5
        if operator.world_rank == 2:
            raise ZeroDivisionError
        dist.barrier()

    def script(trainer: TorchTrainer) -> None:
        if trained:
            trainer.train()
        with pytest.raises(ZeroDivisionError):
            trainer.apply_all_operators(function)
        trainer.train()

    expected, _ = outcome(3, script, every=every)
    found, reasons = outcome(3, script, [Fault("kill", "state", 2)], every=every)
    assert found[1:] == expected[1:] == (0.05, 0.0) and reasons == ["worker death"]
    assert found[0] == pytest.approx(expected[0], rel=1e-9)

"""What raysgd adds to a step on a device that computes later, counted: launches, waits, and calls of its functions."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.core.hang import PACKAGE
from raysgd.replica.replica_base import ReplicaBase
from tests.emulated.late_group import install
from tests.emulated.on_late import OnLate

BATCH, STEPS, FIRST = 4, 14, 7  # in the first steps, torch forms its buckets, and raysgd looks at the weights


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4))


def conv() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers, nn.Flatten(), nn.Linear(64, 4))


class Gpt(nn.Module):
    """Two blocks over sequences of 8 vectors, each of which sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = each(x)
        return self.head(x.flatten(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.first(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2)
        later = torch.ones_like(scores).triu(1).bool()
        x = x + self.out(scores.masked_fill(later, -1e9).softmax(-1) @ value)
        return x + self.inner(x)


MODELS: dict[str, Any] = {
    "mlp": (mlp, nn.MSELoss),
    "conv": (conv, nn.CrossEntropyLoss),
    "gpt": (Gpt, nn.CrossEntropyLoss),
}
REPORT = ReplicaBase.report.__code__


def made(model: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    net = MODELS[model][0]()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01), MODELS[model][1]()


class Counted(OnLate, TrainingOperator):
    """Counts from one forward pass to the next: launches, waits for the device, and calls of raysgd's functions without those
    that send the progress, which depend on the time."""

    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer, criterion = made(config["model"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=criterion
        )
        rows = BATCH * STEPS * self.world_size
        classes = torch.randint(0, 4, (rows,)) if config["model"] != "mlp" else torch.randn(rows, 4)
        self.register_data(train_loader=DataLoader(TensorDataset(torch.randn(rows, 8, 8), classes), batch_size=BATCH))
        self.stream: Any = import_module("tests.emulated.late_device").stream
        self.marks: list[tuple[int, int, int]] = []
        self.calls, self.reporting = 0, False
        model.register_forward_pre_hook(self.mark)

    def mark(self, *_: Any) -> None:
        sys.setprofile(None)
        self.marks.append((self.stream.launched, self.stream.waits.total(), self.calls))
        sys.setprofile(self.count)

    def count(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code == REPORT and event in ("call", "return"):
            self.reporting = event == "call"
        self.calls += (
            event == "call" and not self.reporting and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"
        )


class Telling(Counted):
    """Reports three numbers of each step."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        found = super().train_batch(batch, batch_info)
        return {**found, "first": found["train_loss"], "second": found["train_loss"]}


def between(marks: list[Any], parts: int) -> list[Any]:
    """Return the counts of each step, which has so many forward passes, without the first ones."""
    steps = marks[::parts][FIRST:]
    return [tuple(after - before for before, after in zip(*pair, strict=True)) for pair in pairwise(steps)]


def counts(operator: Any) -> tuple[list[Any], list[Any]]:
    """Return those of the operator, and the launches of a loop by hand that trains alike."""
    sys.setprofile(None)
    own, device = len(operator.marks) // STEPS, operator.device
    net, optimizer, criterion = made(operator.config["model"])
    wrapped = net = net.to(device)
    if operator.world_size > 1:
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
    by_hand = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part, (x, y) in zip(range(own), operator._registered.train_loader, strict=False):
            by_hand.append((operator.stream.launched,))
            with wrapped.no_sync() if part < own - 1 and wrapped is not net else nullcontext():
                loss = criterion(wrapped(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
                (loss / own if own > 1 else loss).backward()
        optimizer.step()
    return between(operator.marks, own), between(by_hand, own)


def install_with_pinned_memory() -> None:
    """Let snapshots wait on the device, as those of CUDA do."""
    install()
    late, replica, memory = (
        cast("Any", import_module(each))
        for each in ("tests.emulated.late_device", "raysgd.torch.replica", "raysgd.torch.state.host_memory")
    )
    replica.HostMemory = partial(memory.HostMemory, cuda=late.module)
    memory._pinned = partial(torch.empty, dtype=torch.uint8)  # the device has none


def install_with_deal() -> None:
    """Let the first of two workers compute three of four parts."""
    install()
    cast("Any", import_module("raysgd.core.decisions.dealing")).dealt = lambda parts, seconds: (3, 1)


def counted(model: str, workers: int, **arguments: Any) -> list[Any]:
    """Train. Return for each rank what `counts` does."""
    with TorchTrainer(
        num_workers=workers,
        use_ray=True,
        num_cpus_per_worker=0.01,
        use_gpu=False,
        backend="nccl",
        config={"model": model},
        **{"training_operator_cls": Counted, "initialization_hook": install, **arguments},
    ) as trainer:
        trainer.train()
        return list(trainer.apply_all_operators(counts))


def beyond(model: str, workers: int, **arguments: Any) -> list[Any]:
    """Return for each rank what a step has: launches beyond those by hand, waits, and calls."""
    found = counted(model, workers, **arguments)
    # Of the step with the fewest: progress messages, which depend on the time, add some.
    return [min((step[0] - hand[0][0], *step[1:]) for step in own) for own, hand in found]


# Workers and other arguments; for each model what the ranks have.
Costs = list[tuple[int, int, int]]
TABLE: dict[str, tuple[int, dict[str, Any], dict[str, Costs]]] = {
    "one worker": (1, {}, {"mlp": [(1, 0, 43)], "conv": [(3, 0, 50)], "gpt": [(3, 0, 50)]}),
    "two workers": (2, {}, {"mlp": [(1, 1, 61)] * 2, "conv": [(5, 1, 91)] * 2, "gpt": [(10, 1, 74)] * 2}),
    "two parts": (1, {"parts": 2}, {"mlp": [(14, 0, 190)], "conv": [(39, 0, 288)], "gpt": [(29, 0, 281)]}),
    "three parts and one": (
        2,
        {"parts": 4, "elastic": ElasticConfig(shares="speed"), "initialization_hook": install_with_deal},
        {"mlp": [(21, 1, 339), (5, 1, 113)], "conv": [(48, 1, 497), (5, 1, 132)], "gpt": [(41, 1, 506), (10, 1, 126)]},
    ),
}
RARER = {"two parts", "three parts and one"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.more] * (row in RARER)) for row in TABLE])
def test_what_raysgd_adds_to_a_step(ray_cluster: None, row: str, model: str) -> None:
    workers, arguments, expected = TABLE[row]
    found = beyond(model, workers, **arguments)
    assert [each[:2] for each in found] == [each[:2] for each in expected[model]]
    assert all(calls <= most for (*_, calls), (*_, most) in zip(found, expected[model], strict=True)), found


def test_numbers_of_a_step_are_kept_with_one_launch(ray_cluster: None) -> None:
    [(launches, waits, calls)] = beyond("mlp", 1, training_operator_cls=Telling)
    assert (launches, waits) == (1, 0) and calls <= 41, calls


@pytest.mark.parametrize("workers", [1, 2])
def test_no_step_waits_for_a_snapshot(ray_cluster: None, workers: int) -> None:
    """One wait is that for all gradients."""
    arguments = {"initialization_hook": install_with_pinned_memory, "elastic": ElasticConfig(snapshot_every=1)}
    found = counted("conv", workers, **arguments)
    assert [{waits for _, waits, _ in own} for own, _ in found] == [{workers - 1}] * workers

"""What is trained in the benchmarks: a model, its data and a batch size, the same for every contender.

Data are random tensors that lie in memory, so that what is measured is the step and the loop around it.
Nothing of raysgd is imported before a workload needs its models: peers that train the tiny one do not pay
for it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Workload:
    """One thing to train. `steps` is how many batches each worker does in an epoch, and `alone` how many one without
    peers does, which is faster."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    criterion: Callable[[Any, Any], torch.Tensor]
    batch_size: int
    steps: int
    alone: int | None = None
    lr: float = 0.01

    def samples(self, workers: int) -> int:
        return self.steps * self.batch_size * workers

    def dataset(self, workers: int) -> Dataset[Any]:
        """The whole epoch's data, of all workers, the same in every process."""
        torch.manual_seed(0)
        return self.data(self.samples(workers))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def shortened(self, steps: int) -> "Workload":
        return replace(self, steps=steps)


@dataclass(frozen=True)
class Setting:
    """A workload, and how many workers share it."""

    workload: Workload
    workers: int

    def environment(self) -> dict[str, str]:
        """For programs of their own: `Setting.of_environment()` there is this one."""
        chosen = {"workload": self.workload.name, "steps": self.workload.steps, "workers": self.workers}
        return {"SETTING": json.dumps(chosen)}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Setting":
        chosen = json.loads(environment["SETTING"])
        return cls(WORKLOADS[chosen["workload"]].shortened(chosen["steps"]), chosen["workers"])


def tiny_model() -> nn.Module:
    """Small enough that a step is nearly all overhead."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny_data(samples: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 32), torch.randint(10, (samples,)))


def small_resnet() -> nn.Module:
    """Two stages of the library's CIFAR ResNet, with the images halved to keep a CPU step near 50 ms."""
    from raysgd.operators.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1, 0, 0), num_classes=10)


def images(samples: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 3, 16, 16), torch.randint(10, (samples,)))


def small_gpt() -> nn.Module:
    from raysgd.operators.language_model import GPT

    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, block_size=BLOCK_SIZE, width=64, heads=4, layers=2)


def token_blocks(samples: int) -> Dataset[Any]:
    tokens = torch.randint(VOCABULARY, (samples, BLOCK_SIZE + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


CLASSES = nn.functional.cross_entropy
VOCABULARY, BLOCK_SIZE = 64, 32
WORKLOADS = named(
    Workload("tiny", tiny_model, tiny_data, CLASSES, batch_size=32, steps=400, alone=1200),
    Workload("resnet", small_resnet, images, CLASSES, batch_size=16, steps=20),
    Workload("gpt", small_gpt, token_blocks, token_loss, batch_size=16, steps=60, alone=90),
)

"""What is trained in the benchmarks: a model, its data and a batch size, the same for every contender.

Data are random tensors that lie in memory, so that what is measured is the step and the loop around it.
Nothing of raysgd is imported before a workload needs its models: peers that train the tiny one do not pay
for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """One thing to train. `steps` is how many batches each worker does in an epoch."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    criterion: Callable[[Any, Any], torch.Tensor]
    batch_size: int
    steps: int
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


def tiny_model() -> nn.Module:
    """Small enough that a step is nearly all overhead."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny_data(samples: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 32), torch.randint(10, (samples,)))


def small_resnet() -> nn.Module:
    """Two stages of the library's CIFAR ResNet, with the images halved to keep a CPU step near 50 ms."""
    from raysgd.torch.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1, 0, 0), num_classes=10)


def small_images(samples: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 3, 16, 16), torch.randint(10, (samples,)))


def small_gpt() -> nn.Module:
    from raysgd.operators.language_model import GPT

    torch.manual_seed(0)
    return GPT(vocabulary=64, block_size=32, width=64, heads=4, layers=2)


def token_blocks(samples: int) -> Dataset[Any]:
    tokens = torch.randint(64, (samples, 33))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", tiny_model, tiny_data, nn.functional.cross_entropy, batch_size=32, steps=1000),
        Workload("resnet", small_resnet, small_images, nn.functional.cross_entropy, batch_size=16, steps=60),
        Workload("gpt", small_gpt, token_blocks, token_loss, batch_size=16, steps=200),
    )
}

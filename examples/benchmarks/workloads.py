"""What is trained in the benchmarks: a model, its data and a batch size, the same for every contender.

Data are random tensors that lie in memory, so that what is measured is the step and the loop around it.
Nothing of raysgd is imported before a workload needs its models: peers that train the tiny one do not pay
for it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """One thing to train. `steps` is how many batches each worker does in an epoch, and `alone` how many one without
    peers does, which is faster; `tokens`, for text, is how many a sample has."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    criterion: Callable[[Any, Any], torch.Tensor]
    batch_size: int
    steps: int
    alone: int | None = None
    lr: float = 0.01
    tokens: int = 1  # in a sample

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
    """A workload, how many workers share it, in which precision, on which kind of device."""

    workload: Workload
    workers: int
    precision: str = "fp32"
    device: str = "cpu"

    @property
    def plain(self) -> bool:
        """Nothing to move and nothing to cast: the loop has no line for either."""
        return (self.precision, self.device) == ("fp32", "cpu")

    def place(self, gpu: int) -> torch.device:
        return torch.device("cuda", gpu) if self.device == "cuda" else torch.device("cpu")

    def autocast(self) -> torch.autocast:
        lower = self.precision != "fp32"
        return torch.autocast(self.device, dtype=PRECISIONS[self.precision] if lower else None, enabled=lower)

    def environment(self) -> dict[str, str]:
        """For programs of their own: `Setting.of_environment()` there is this one."""
        told = {"workload": self.workload.name, "steps": self.workload.steps, "workers": self.workers}
        return {"SETTING": json.dumps({**told, "precision": self.precision, "device": self.device})}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Setting":
        told = json.loads(environment["SETTING"])
        every = {**WORKLOADS, **GPU_WORKLOADS, **SMALL_GPU_WORKLOADS}
        workload = every[told.pop("workload")].shortened(told.pop("steps"))
        return cls(workload, **told)


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


def images(samples: int, *, side: int, classes: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 3, side, side), torch.randint(classes, (samples,)))


def resnet50() -> nn.Module:
    from imagenet_resnet import ResNet50

    torch.manual_seed(0)
    return ResNet50()


def gpt(*, vocabulary: int, block_size: int, width: int, heads: int, layers: int) -> nn.Module:
    from raysgd.operators.language_model import GPT

    torch.manual_seed(0)
    return GPT(vocabulary=vocabulary, block_size=block_size, width=width, heads=heads, layers=layers)


def token_blocks(samples: int, *, vocabulary: int, block_size: int) -> Dataset[Any]:
    tokens = torch.randint(vocabulary, (samples, block_size + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


CLASSES = nn.functional.cross_entropy
SMALL_GPT = partial(gpt, vocabulary=64, block_size=32, width=64, heads=4, layers=2)
SMALL_BLOCKS = partial(token_blocks, vocabulary=64, block_size=32)
# 124 million parameters; the vocabulary is GPT-2's, made a multiple of 64.
LARGE_GPT = partial(gpt, vocabulary=50_304, block_size=1024, width=768, heads=12, layers=12)
LARGE_BLOCKS = partial(token_blocks, vocabulary=50_304, block_size=1024)

WORKLOADS = named(
    Workload("tiny", tiny_model, tiny_data, CLASSES, batch_size=32, steps=400, alone=1200),
    Workload("resnet", small_resnet, partial(images, side=16, classes=10), CLASSES, batch_size=16, steps=20),
    Workload("gpt", SMALL_GPT, SMALL_BLOCKS, token_loss, batch_size=16, steps=60, alone=90),
)
GPU_WORKLOADS = named(
    Workload("resnet50", resnet50, partial(images, side=224, classes=1000), CLASSES, batch_size=128, steps=40),
    Workload("gpt124m", LARGE_GPT, LARGE_BLOCKS, token_loss, batch_size=8, steps=40, tokens=1024),
)
# The same code on small things, to see on a CPU that it runs.
SMALL_GPU_WORKLOADS = named(
    Workload("resnet50 (small)", resnet50, partial(images, side=32, classes=1000), CLASSES, batch_size=2, steps=2),
    Workload("gpt124m (small)", SMALL_GPT, SMALL_BLOCKS, token_loss, batch_size=2, steps=2, tokens=32),
)

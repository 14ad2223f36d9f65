"""E and F: time and memory of a step against hand-written loops, loaders that are slow, and waits for the device.

The hand-written loop is as good as people write it: the next batch is gathered, pinned and copied on a stream of its own.
Both train the same model in this process, in blocks of at least 1.5 s that take turns in random order.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.operators.language_model import GPT
from tools.gpu import common
from tools.gpu.notes import Notes, first_line, spread
from tools.gpu.phase_bits import mlp, token_loss

BLOCK_S, PAIRS = 1.5, 8
SMALL_S = 4.0  # for all pairs, without a GPU: only to see that this runs


@dataclass(frozen=True)
class Workload:
    """What is trained: `batches` are those of an epoch, and `make` returns data for so many rows."""

    name: str
    model: Callable[[], nn.Module]
    make: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]
    batch: int
    batches: int
    precision: str
    channels_last: bool = False

    def data(self) -> TensorDataset:
        torch.manual_seed(0)
        return TensorDataset(*self.make(self.batch * self.batches))


def resnet50() -> nn.Module:
    made: nn.Module = importlib.import_module("torchvision.models").resnet50()
    return made


def gpt2_small() -> nn.Module:
    return GPT(vocabulary=50257, block_size=1024, width=768, heads=12, layers=12)


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = torch.randn(rows, 3, 224, 224, device=common.device()).cpu()
    return pictures, torch.randint(1000, (rows,))


def blocks(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.randint(50257, (rows, 1025))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def vectors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 32), torch.randint(10, (rows,))


MLP = Workload("MLP, batch 64", mlp, vectors, cross_entropy, 64, 400, "fp32")
WORKLOADS = (
    MLP,
    Workload("ResNet-50, bf16, channels_last, batch 128", resnet50, images, cross_entropy, 128, 16, "bf16", True),
    Workload("GPT-2 small, bf16, batch 8 x 1024", gpt2_small, blocks, token_loss, 8, 24, "bf16"),
)


class Trained(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        workload: Workload = config["workload"]
        torch.manual_seed(1)
        model = workload.model()
        registered = self.register(models=model, optimizers=optimizer_of(model), criterion=workload.loss)
        self.model, self.optimizer, self.criterion = registered
        self.register_data(train_loader=self.loader(config))

    def loader(self, config: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(config["data"], batch_size=config["workload"].batch)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def by_raysgd(workload: Workload, data: Any, operator: type[TrainingOperator] = Trained, **given: Any) -> TorchTrainer:
    kept: dict[str, Any] = {"precision": workload.precision, "channels_last": workload.channels_last}
    options = TrainingOptions(**kept, **given)
    config, on_gpu = {"workload": workload, "data": data}, common.gpus() > 0
    return TorchTrainer(training_operator_cls=operator, config=config, options=options, use_gpu=on_gpu, seed=1)


class HandWritten:
    """The loop that people write, with a prefetch on a stream of its own. `waits` adds a wait for the device before each step."""

    def __init__(self, workload: Workload, data: TensorDataset) -> None:
        torch.manual_seed(1)
        self.workload, self.data, self.waits = workload, data, False
        self.kept: Any = {"memory_format": torch.channels_last} if workload.channels_last else {}
        self.model = workload.model().to(common.device(), **self.kept)
        self.optimizer = optimizer_of(self.model)
        self.stream = torch.cuda.Stream() if common.gpus() else None

    def copied(self, index: int) -> list[torch.Tensor]:
        rows = slice(index * self.workload.batch, (index + 1) * self.workload.batch)
        parts = [each[rows] for each in self.data.tensors]
        if self.stream is None:
            return parts
        with torch.cuda.stream(self.stream):
            moved = [each.pin_memory().to("cuda", non_blocking=True) for each in parts]
            return [each.contiguous(**self.kept) if each.dim() == 4 else each for each in moved]

    def batches(self) -> Iterator[list[torch.Tensor]]:
        following = self.copied(0)
        for index in range(self.workload.batches):
            batch = following
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                for each in batch:
                    each.record_stream(torch.cuda.current_stream())
            if index + 1 < self.workload.batches:
                following = self.copied(index + 1)
            yield batch

    def epoch(self) -> None:
        for features, target in self.batches():
            self.optimizer.zero_grad()
            half = self.workload.precision == "bf16"
            with torch.autocast(common.device().type, dtype=torch.bfloat16, enabled=half):
                loss = self.workload.loss(self.model(features), target)
            loss.backward()
            if self.waits:
                common.wait()
            self.optimizer.step()
        loss.item()

    def waiting_epoch(self) -> None:
        self.waits = True
        self.epoch()
        self.waits = False


def ratios(notes: Notes) -> None:
    """E: medians of the ratios of neighbouring blocks."""
    workloads = [replace(MLP, batches=20)] if notes.small else WORKLOADS
    for number, workload in enumerate(workloads):
        seconds = SMALL_S if notes.small else notes.left() / (len(workloads) - number)
        try:
            compare(notes, workload, seconds)
        except Exception as error:
            notes.add(f"{workload.name}: time of a step", "not run", note=first_line(error))
        if common.gpus():
            torch.cuda.empty_cache()


def compare(notes: Notes, workload: Workload, seconds: float) -> None:
    limit, data = time.monotonic() + seconds, workload.data()
    before = allocated()
    by_hand = HandWritten(workload, data)
    by_hand.epoch()
    own = {"hand-written": allocated() - before}
    before = allocated()
    with ExitStack() as both:
        trainer = both.enter_context(by_raysgd(workload, data))
        trainer.train()
        own["raysgd"] = allocated() - before
        waiting = both.enter_context(by_raysgd(workload, data, on_nonfinite="skip"))
        waiting.train()
        contenders = {"hand-written": by_hand.epoch, "raysgd": trainer.train}
        contenders |= {"waiting": by_hand.waiting_epoch, "waiting raysgd": waiting.train}
        epochs = round(min(BLOCK_S, seconds / 50) / timed(by_hand.epoch, 1)[0]) + 1
        times: dict[str, list[float]] = {name: [] for name in contenders}
        peaks: dict[str, float] = {}
        while not peaks or (len(times["raysgd"]) < PAIRS and time.monotonic() < limit):
            for name in random.sample(list(contenders), len(contenders)):
                taken, peak = timed(contenders[name], epochs)
                times[name].append(taken / epochs / workload.batches)
                peaks[name] = own.get(name, 0.0) + peak
    step = {name: statistics.median(each) for name, each in times.items()}
    notes.add(f"{workload.name}: a hand-written step", round(1000 * step["hand-written"], 4), "ms")
    for name, other, text in (
        ("raysgd", "hand-written", "raysgd, against it"),
        ("waiting", "hand-written", "the loop that waits before each step, against it"),
        ("waiting raysgd", "waiting", "raysgd with on_nonfinite, against the loop that waits"),
    ):
        ratio = [mine / theirs for mine, theirs in zip(times[name], times[other], strict=True)]
        notes.add(f"{workload.name}: {text}", spread(ratio), note=quartiles(ratio))
    if common.gpus():
        memory = peaks["raysgd"] / peaks["hand-written"]
        notes.add(
            f"{workload.name}: peak memory, against it", round(memory, 4), note=f"{peaks['raysgd'] / 2**20:.0f} MiB"
        )


def quartiles(values: list[float]) -> str:
    if len(values) < 4:
        return f"{len(values)} pairs"
    first, _, third = statistics.quantiles(values, n=4)
    return f"{len(values)} pairs, quartiles {first:.4f} and {third:.4f}"


def timed(epoch: Callable[[], Any], epochs: int) -> tuple[float, float]:
    """Return the seconds of some epochs, and the most memory of the GPU that they used beyond what there was."""
    common.wait()
    before, began = allocated(), time.perf_counter()
    if common.gpus():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(epochs):
        epoch()
    common.wait()
    peak = torch.cuda.max_memory_allocated() - before if common.gpus() else 0.0
    return time.perf_counter() - began, peak


def allocated() -> float:
    return float(torch.cuda.memory_allocated()) if common.gpus() else 0.0


# -- F ------------------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """Has batches instead of rows, and each takes some seconds to read."""

    def __init__(self, workload: Workload) -> None:
        self.batches = list(zip(*(each.split(workload.batch) for each in workload.data().tensors), strict=True))
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.batches[index]


class SlowlyTrained(Trained):
    def loader(self, config: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(config["data"], batch_size=None)


WIDTH = 8192
WIDE = Workload(
    "wide",
    lambda: nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)),
    vectors,
    cross_entropy,
    batch=2048,
    batches=50,
    precision="fp32",
)


def overlap(notes: Notes) -> None:
    """F: a step with a slow loader takes the longer of both times; nothing waits for the device."""
    workload = replace(MLP, batches=50) if notes.small else WIDE
    slow = Slow(workload)
    with by_raysgd(workload, slow, SlowlyTrained) as trainer:
        trainer.train()
        step = timed(trainer.train, 1)[0] / workload.batches
        notes.add("a step whose data is in memory", round(1000 * step, 3), "ms")
        note_waits(notes, trainer)
        for factor in (0.5, 1.0, 2.0):
            slow.seconds = factor * step
            taken = timed(trainer.train, 1)[0] / workload.batches
            notes.add(f"a loader of {factor:g} steps, against the longer time", round(taken / step / max(1, factor), 3))


def note_waits(notes: Notes, trainer: TorchTrainer) -> None:
    if not common.gpus():
        return notes.add("waits for the device in 50 steps", "not run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.train()
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing" in str(each.message)]
    places = sorted({f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in waits})
    notes.add("waits for the device in 50 steps", len(waits), note=", ".join(places))

"""G: what snapshots, saves and loads cost, with models of 1.5 and 5 GB in one worker of Ray."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from tools.gpu import common
from tools.gpu.notes import Notes, first_line

EVERY, STEPS = 30, 60  # a snapshot's steps, and those of an epoch


class Large(TrainingOperator):
    """Linear layers of config["bytes"] with plain SGD, so that the state is the weights; notes when each step begins."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        width = config["width"]
        layers = [nn.Linear(width, width, bias=False) for _ in range(config["bytes"] // (4 * width * width))]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        registered = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        self.model, self.optimizer, self.criterion = registered
        rows = torch.randn(8 * STEPS, width)
        self.register_data(train_loader=DataLoader(TensorDataset(rows, rows), batch_size=8))
        self.began: list[float] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        common.wait()
        self.began.append(time.monotonic())
        return super().train_batch(batch, batch_info)


def begins(operator: Any) -> list[float]:
    found, operator.began = operator.began, []
    return list(found)


def peak(operator: Any) -> float:
    """Return the most memory of the GPU since the last call, by that of now."""
    if not common.gpus():
        return 0.0
    most = torch.cuda.max_memory_allocated() / torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def saves(notes: Notes) -> None:
    for size in [1 << 24] if notes.small else [3 << 29, 5 << 30]:
        name = f"{size / 2**30:.2g} GiB"
        if notes.left() < size >> 28:
            notes.add(f"{name}: state", "not run", note="no time left")
            continue
        try:
            measure(notes, name, size)
        except Exception as error:
            notes.add(f"{name}: state", "an error", note=first_line(error))


def measure(notes: Notes, name: str, size: int) -> None:
    config = {"bytes": size, "width": 512 if notes.small else 8192}
    given: dict[str, Any] = {"use_ray": True, "use_gpu": common.gpus() > 0, "num_cpus_per_worker": 1}
    elastic = ElasticConfig(snapshot_every=EVERY)
    in_memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 4 * size else None  # not the speed of a disk
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        path = Path(folder, "state.pt")
        with TorchTrainer(training_operator_cls=Large, config=config, elastic=elastic, **given) as trainer:
            trainer.train()
            (times,) = trainer.apply_all_operators(begins)
            steps = [later - earlier for earlier, later in itertools.pairwise(times)]
            step = statistics.median(steps)
            pause = max(steps) - step
            notes.add(
                f"{name}: longest pause of a step with snapshots", round(pause, 4), "s", f"a step takes {step:.4f} s"
            )
            seconds(notes, f"{name}: save()", lambda: trainer.save(path))
            seconds(notes, f"{name}: save(blocking=False) returns", lambda: trainer.save(path, blocking=False))
            trainer.train()
            trainer.apply_all_operators(peak)
            seconds(notes, f"{name}: load()", lambda: trainer.load(path))
            most = trainer.apply_all_operators(peak)[0]
            notes.add(f"{name}: most memory of the GPU in load()", round(most, 3), "of the memory afterwards")
        with TorchTrainer(training_operator_cls=Large, config=config, use_gpu=False) as trainer:
            seconds(notes, f"{name}: load() on CPUs", lambda: trainer.load(path))


def seconds(notes: Notes, what: str, action: Any) -> None:
    began = time.monotonic()
    action()
    notes.add(what, round(time.monotonic() - began, 4), "s")

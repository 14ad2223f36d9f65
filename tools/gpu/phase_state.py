"""G: what snapshots, saves, loads and changes of the workers cost, with models of 1 and 10 GB."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from tests.peek import newest_snapshot
from tools.gpu import common
from tools.gpu.notes import Notes, first_line

EVERY, STEPS = 30, 60  # a snapshot's steps, and those of an epoch
FIRST_S = 2.0  # to send 1 GiB to the driver: an epoch's first snapshot is sent before the one that is measured


class Large(TrainingOperator):
    """Linear layers of config["bytes"] with plain SGD, so that the state is the weights; notes when the host comes to
    each step, when the device is there, too, and when the host has launched the step."""

    def setup(self, config: dict[str, Any]) -> None:
        width = config["width"]
        layers = [
            nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(config["bytes"] // (4 * width**2))
        ]
        for layer in layers:
            nn.init.constant_(layer.weight, 1 / width)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        registered = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        self.model, self.optimizer, self.criterion = registered
        rows = torch.ones(8 * STEPS, width)
        self.register_data(train_loader=DataLoader(TensorDataset(rows, rows), batch_size=8))
        self.times: list[tuple[float, float, float]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if len(self.times) == EVERY // 2:
            time.sleep(FIRST_S * self.config["bytes"] / 2**30)
        came = time.monotonic()
        common.wait()
        began = time.monotonic()
        found: dict[str, Any] = super().train_batch(batch, batch_info)
        self.times.append((came, began, time.monotonic()))
        return found


def times(operator: Any) -> list[tuple[float, float, float]]:
    found, operator.times = operator.times, []
    return list(found)


def peak(operator: Any) -> float:
    """Return the most memory of the GPU since the last call, by that of now."""
    if not common.gpus():
        return 0.0
    most = torch.cuda.max_memory_allocated() / torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def saves(notes: Notes) -> None:
    took = 0.0  # for each byte
    for size in [1 << 24] if notes.small else [1 << 30, 10 << 30]:
        name, began = f"{size / 2**30:.2g} GiB", time.monotonic()
        if notes.left() < took * size:
            notes.add(f"{name}: state", "not run", note="no time left")
            continue
        for part in changes, measure:
            try:
                part(notes, name, size)
            except Exception as error:
                notes.add(f"{name}: {part.__name__}", "an error", note=first_line(error))
        took = (time.monotonic() - began) / size


def described(notes: Notes, size: int) -> dict[str, Any]:
    return {"bytes": size, "width": 512 if notes.small else 8192}


def by_hand(operator: Any) -> tuple[float, float]:
    """Return the seconds of a broadcast of the weights, and of DistributedDataParallel."""

    def timed(action: Any) -> float:
        dist.barrier()
        common.wait()
        began = time.monotonic()
        made = action()
        common.wait()
        took = time.monotonic() - began
        del made
        return took

    model = operator.unwrapped()
    return (
        timed(lambda: [dist.broadcast(each.detach(), 0) for each in model.parameters()]),
        timed(lambda: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    )


def changes(notes: Notes, name: str, size: int) -> None:
    """Remove a worker, add one, and kill one, beside what moves the same state by hand."""
    elastic = ElasticConfig(snapshot_every=None, hang_timeout_s=60)
    arguments = {**common.group_arguments(2), "config": described(notes, size), "timeout_s": 60}
    with TorchTrainer(training_operator_cls=Large, elastic=elastic, **arguments) as trainer:
        trainer.train(num_steps=1)
        for what, found in zip(
            ("a broadcast of the weights", "DistributedDataParallel(model)"),
            zip(*trainer.apply_all_operators(by_hand), strict=True),
            strict=True,
        ):
            notes.add(f"{name}: {what}", round(max(found), 4), "s")
        for workers in (1, 2):
            trainer.resize(workers)
            trainer.train(num_steps=1)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        trainer.train(num_steps=1)
        for each in trainer.recoveries[:3]:
            notes.add(f"{name}: {each.reason}, to {each.world_size_after}", round(each.seconds, 4), "s")
        seconds(notes, f"{name}: get_model()", trainer.get_model)


def measure(notes: Notes, name: str, size: int) -> None:
    config = described(notes, size)
    given: dict[str, Any] = {"use_ray": True, "use_gpu": common.gpus() > 0, "num_cpus_per_worker": 1}
    elastic = ElasticConfig(snapshot_every=EVERY)
    in_memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 4 * size else None  # not the speed of a disk
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        path = Path(folder, "state.pt")
        with TorchTrainer(training_operator_cls=Large, config=config, elastic=elastic, **given) as trainer:
            trainer.train()
            pauses(notes, f"{name}: a snapshot", trainer, EVERY)
            seconds(notes, f"{name}: save()", lambda: trainer.save(path))
            began = time.monotonic()
            handle = trainer.save(path, blocking=False)
            notes.add(f"{name}: save(blocking=False) returns", round(time.monotonic() - began, 4), "s")
            handle.result()
            notes.add(f"{name}: save(blocking=False), in total", round(time.monotonic() - began, 4), "s")
            trainer.apply_all_operators(peak)
            seconds(notes, f"{name}: load()", lambda: trainer.load(path))
            most = trainer.apply_all_operators(peak)[0]
            notes.add(f"{name}: most memory of the GPU in load()", round(most, 3), "of the memory afterwards")
        if notes.left() < size >> 28:
            notes.add(f"{name}: load() on CPUs", "not run", note="no time left")
            return
        with TorchTrainer(training_operator_cls=Large, config=config, use_gpu=False) as trainer:
            seconds(notes, f"{name}: load() on CPUs", lambda: trainer.load(path))


def pauses(notes: Notes, what: str, trainer: TorchTrainer, step: int) -> None:
    """Note by how much the pause before this step is longer than usual, for the host alone and with the device."""
    (found,) = trainer.apply_all_operators(times)
    # The last call has waited until a snapshot within it had arrived, before it took the one of its end.
    taken = newest_snapshot(trainer).progress.step >= step
    host = [came - launched for (_, _, launched), (came, _, _) in itertools.pairwise(found)]
    both = [later - began for (_, began, _), (_, later, _) in itertools.pairwise(found)]
    usual = statistics.median(both)
    note = f"a step takes {usual:.4f} s{'' if taken else '; it was left out'}"
    notes.add(f"{what}: pause of the host", round(host[step - 1] - statistics.median(host), 4), "s", note)
    notes.add(f"{what}: pause of the device", round(both[step - 1] - usual, 4), "s", note)


def seconds(notes: Notes, what: str, action: Any) -> None:
    began = time.monotonic()
    action()
    notes.add(what, round(time.monotonic() - began, 4), "s")

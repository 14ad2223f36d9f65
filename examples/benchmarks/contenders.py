"""Who takes part in the throughput benchmark. Each trains the same workload, an epoch whenever it is told to.

A contender has `name`, `epoch()` (one epoch, seen from the driver), `processes()` (its workers' ids) and
`stop()`. All keep their workers alive between epochs, and idle while another one trains.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ray
import torch
from gate import Program
from handwritten import HandWritten
from processes import search_path
from torch.utils.data import DataLoader, Sampler, default_collate
from workloads import Setting

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator, TrainingOptions

__all__ = [
    "BASE",
    "ENTRIES",
    "USUAL",
    "BenchmarkOperator",
    "Contender",
    "Entry",
    "RaySGD",
    "cluster",
    "standing",
]

BASE = "hand-written"


class Contender(Protocol):
    name: str

    def epoch(self) -> None: ...

    def processes(self) -> list[int]: ...

    def stop(self) -> None: ...


class BenchmarkOperator(TrainingOperator):
    """Nothing of its own: the library's default loop and batch."""

    def setup(self, config):
        setting = config["setting"]
        workload = setting.workload
        model = workload.model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=workload.optimizer(model), criterion=workload.criterion
        )
        self.register_data(
            train_loader=DataLoader(
                workload.dataset(setting.workers),
                batch_size=workload.batch_size,
                shuffle=True,
                pin_memory=setting.device == "cuda",
            )
        )


class CollatingOperator(BenchmarkOperator):
    """Its loader collates sample by sample, as everybody else's does here: a collate function of one's own."""

    def setup(self, config):
        super().setup(config)
        loader = self._get_train_loader()
        self.register_data(
            train_loader=DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                shuffle=True,
                pin_memory=loader.pin_memory,
                collate_fn=lambda samples: default_collate(samples),
            )
        )


class RaySGD:
    """raysgd as it comes: elastic, with progress messages, a snapshot per epoch and metrics over workers."""

    name = "raysgd"
    operator = BenchmarkOperator
    gradients = "samples"

    def __init__(self, setting: Setting, *, cpus: float = 1, elastic: ElasticConfig | None = None) -> None:
        self.trainer = TorchTrainer(
            training_operator_cls=self.operator,
            num_workers=setting.workers,
            num_cpus_per_worker=cpus,
            use_gpu=setting.device == "cuda",
            use_ray=True,
            elastic=elastic,
            options=TrainingOptions(precision=setting.precision, gradients=self.gradients),
            config={"setting": setting},
        )

    def epoch(self) -> None:
        self.trainer.train()

    def nothing(self) -> None:
        """A call that does nothing, for the price of one."""
        self.trainer.apply_all_workers(os.getpid)

    def processes(self) -> list[int]:
        return self.trainer.apply_all_workers(os.getpid)

    def stop(self) -> None:
        self.trainer.shutdown()


class Collating(RaySGD):
    """What the loop itself costs: the batches come as a hand-written loop's do."""

    name = "raysgd, collating"
    operator = CollatingOperator


class OfRanks(RaySGD):
    """Averages the means of the workers, as DDP does: what steps cost before gradients were weighted."""

    name = "raysgd, mean of ranks"
    gradients = "ranks"


class UnequalBatches(Sampler):
    """Batches of one sample more and one less in turn, so that two workers have unequal shares in every step."""

    def __init__(self, samples: int, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._samples // self._size

    def __iter__(self) -> Iterator[list[int]]:
        order, start = torch.randperm(self._samples).tolist(), 0
        for number in range(len(self)):
            stop = start + self._size + (-1 if number % 2 else 1)
            yield order[start:stop]
            start = stop


class UnequalOperator(BenchmarkOperator):
    def setup(self, config):
        super().setup(config)
        loader = self._get_train_loader()
        batches = UnequalBatches(len(loader.dataset), loader.batch_size)
        self.register_data(train_loader=DataLoader(loader.dataset, batch_sampler=batches))


class Unequal(RaySGD):
    name = "raysgd, unequal shares"
    operator = UnequalOperator


class UnequalOfRanks(Unequal):
    name = "raysgd, unequal shares, mean of ranks"
    gradients = "ranks"


@dataclass(frozen=True)
class Entry:
    """One who can take part: how it is started, and what must be installed for it."""

    name: str
    start: Callable[[Setting], Contender]
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


@contextlib.contextmanager
def cluster(workers: int, **resources: float) -> Iterator[None]:
    """A local Ray cluster with a CPU for each of so many workers and for what Ray Train needs beside them. Workers
    of every driver in it find the benchmarks' modules, and have the priority of processes that Ray does not start,
    which Ray would lower by 15."""
    os.environ.update(PYTHONPATH=search_path(), RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=workers + 2, include_dashboard=False, log_to_driver=False, **resources)
    try:
        yield
    finally:
        ray.shutdown()


def program(setting: Setting, *, name: str, script: str, launcher: str | None) -> Contender:
    """A program from peers/, on this cluster if it is one of Ray's."""
    extra = {**setting.environment(), "CLUSTER": ray.get_runtime_context().gcs_address}
    return Program.of_script(name, script, extra, setting.workers, launcher=launcher)


def peer(name: str, script: str, *needs: str, launcher: str | None = "torchrun") -> Entry:
    return Entry(name, partial(program, name=name, script=script, launcher=launcher), needs)


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(BASE, HandWritten),
        Entry(RaySGD.name, RaySGD),
        Entry(Collating.name, Collating),
        *(Entry(each.name, each) for each in (OfRanks, Unequal, UnequalOfRanks)),
        peer("torchrun", "with_torchrun.py"),
        peer("Ray Train v2", "with_ray_train.py", "pandas", "pyarrow", launcher=None),
        peer("Lightning", "with_lightning.py", "lightning"),
        peer("Accelerate", "with_accelerate.py", "accelerate"),
        peer("Horovod", "with_horovod.py", "horovod", launcher="horovodrun"),
    )
}
SPECIAL = (OfRanks, Unequal, UnequalOfRanks)  # only stepping.py has them
USUAL = [name for name in ENTRIES if name not in {each.name for each in SPECIAL}]


def standing(names: Sequence[str], setting: Setting) -> list[Contender]:
    """Those that are installed, all started, none of them training."""
    started: list[Contender] = []
    try:
        for name in names:
            if not ENTRIES[name].missing():
                started.append(ENTRIES[name].start(setting))
    except BaseException:
        for contender in started:
            contender.stop()
        raise
    return started

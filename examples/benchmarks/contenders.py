"""Who takes part in the throughput benchmark. Each trains the same workload, an epoch whenever it is told to.

A contender has `name`, `epoch()` (one epoch, seen from the driver), `processes()` (its workers' ids) and
`stop()`. All keep their workers alive between epochs, and idle while another one trains.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import ray
from gate import Program
from handwritten import HandWritten
from processes import PEERS, search_path
from torch.utils.data import DataLoader, default_collate
from workloads import Setting

from raysgd import TorchTrainer, TrainingOperator

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
            )
        )


class CollatingOperator(BenchmarkOperator):
    """Its loader collates sample by sample, as everybody else's does here: a collate function of one's own."""

    def setup(self, config):
        super().setup(config)
        loader = self._registered.train_loader
        self.register_data(
            train_loader=DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                shuffle=True,
                collate_fn=lambda samples: default_collate(samples),
            )
        )


class RaySGD:
    """raysgd as it comes: elastic, with progress messages, a snapshot per epoch and metrics over workers."""

    name = "raysgd"
    operator = BenchmarkOperator
    seed: int | None = None

    def __init__(self, setting: Setting) -> None:
        self.trainer = TorchTrainer(
            training_operator_cls=self.operator,
            num_workers=setting.workers,
            use_ray=True,
            config={"setting": setting},
            seed=self.seed,
        )

    def epoch(self) -> None:
        self.trainer.train()

    def processes(self) -> list[int]:
        return self.trainer.apply_all_workers(os.getpid)

    def stop(self) -> None:
        self.trainer.shutdown()


class Collating(RaySGD):
    """What the loop itself costs: the batches come as a hand-written loop's do."""

    name = "raysgd, collating"
    operator = CollatingOperator


class Seeded(RaySGD):
    """With random numbers by place: each part, and each batch that is read, begins with a seed of its own."""

    name = "raysgd, seeded"
    seed = 1


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[None]:
    """A local Ray cluster with a CPU for each of so many workers and for what Ray Train needs beside them. Workers
    of every driver in it find the benchmarks' modules, and have the priority of processes that Ray does not start,
    which Ray would lower by 15."""
    os.environ.update(PYTHONPATH=search_path(), RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=workers + 2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


# Those that are not programs of their own. The scripts of the others are in peers/.
HERE_STARTED: dict[str, Callable[[Setting], Contender]] = {
    BASE: HandWritten,
    RaySGD.name: RaySGD,
    Collating.name: Collating,
    Seeded.name: Seeded,
}
USUAL = [*HERE_STARTED, *(name for name in PEERS if name not in HERE_STARTED)]


def missing(name: str) -> list[str]:
    return PEERS[name].missing() if name in PEERS else []


def started(name: str, setting: Setting) -> Contender:
    if name in HERE_STARTED:
        return HERE_STARTED[name](setting)
    extra = {**setting.environment(), "CLUSTER": ray.get_runtime_context().gcs_address}
    return Program.of(PEERS[name], extra, setting.workers)


def standing(names: Sequence[str], setting: Setting) -> list[Contender]:
    """Those that are installed, all started, none of them training."""
    contenders: list[Contender] = []
    try:
        for name in names:
            if not missing(name):
                contenders.append(started(name, setting))
    except BaseException:
        for contender in contenders:
            contender.stop()
        raise
    return contenders

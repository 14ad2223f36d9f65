"""Who takes part in the throughput benchmark. Each trains the same workload, epoch by epoch, when it is told to.

A contender has `name`, `epoch()` (one epoch, seen from the driver), `processes()` (its workers' ids) and `stop()`. All
keep their workers alive between epochs, and idle while another one trains.
"""

import os
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Workload

from raysgd import TorchTrainer, TrainingOperator

__all__ = ["CONTENDERS", "Contender", "HandWritten", "RaySGD"]


class Contender(Protocol):
    name: str

    def epoch(self) -> None: ...

    def processes(self) -> list[int]: ...

    def stop(self) -> None: ...


class BenchmarkOperator(TrainingOperator):
    """Nothing of its own: the library's default loop and batch."""

    def setup(self, config):
        workload, workers = config["workload"], config["workers"]
        model = workload.model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=workload.optimizer(model), criterion=workload.criterion
        )
        self.register_data(
            train_loader=DataLoader(
                workload.dataset(workers), batch_size=workload.batch_size, shuffle=True
            )
        )


class RaySGD:
    """raysgd as it comes: elastic, with progress messages, snapshots once per epoch and metrics over workers."""

    name = "raysgd"

    def __init__(self, workload: Workload, workers: int) -> None:
        self.trainer = TorchTrainer(
            training_operator_cls=BenchmarkOperator,
            num_workers=workers,
            use_ray=True,
            config={"workload": workload, "workers": workers},
        )

    def epoch(self) -> None:
        self.trainer.train()

    def processes(self) -> list[int]:
        return self.trainer.apply_all_workers(os.getpid)

    def stop(self) -> None:
        self.trainer.shutdown()


class HandWrittenRank:
    """One rank of the loop that people write themselves, in a Ray actor."""

    def __init__(self, workload: Workload, rank: int, workers: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.workers, self.workload = rank, workers, workload
        self.epochs_completed = 0

    def process(self) -> int:
        return os.getpid()

    def setup(self, host: str, port: int) -> None:
        workload = self.workload
        store = dist.TCPStore(host, port, self.workers, False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.workers)
        bare = workload.model()
        # gradient_as_bucket_view=True is raysgd's default; it is the faster one, so both have it.
        self.model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
        self.optimizer = workload.optimizer(bare)
        dataset = workload.dataset(self.workers)
        self.sampler = DistributedSampler(dataset, self.workers, self.rank, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=self.sampler)

    def epoch(self) -> float:
        """The bare minimum: no metrics but the last loss, read once."""
        model, optimizer, criterion = self.model, self.optimizer, self.workload.criterion
        self.sampler.set_epoch(self.epochs_completed)
        model.train()
        for features, target in self.loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
        self.epochs_completed += 1
        return float(loss)


class HandWritten:
    """The hand-written DDP loop in the same kind of processes: Ray actors, one CPU and one thread each."""

    name = "hand-written"

    def __init__(self, workload: Workload, workers: int) -> None:
        rank_class = ray.remote(HandWrittenRank)
        self._ranks: list[Any] = [
            rank_class.options(num_cpus=1).remote(workload, rank, workers) for rank in range(workers)
        ]
        host = str(ray.util.get_node_ip_address())
        self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        ray.get([rank.setup.remote(host, self._store.port) for rank in self._ranks])

    def epoch(self) -> None:
        ray.get([rank.epoch.remote() for rank in self._ranks])

    def processes(self) -> list[int]:
        return ray.get([rank.process.remote() for rank in self._ranks])

    def stop(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


CONTENDERS = {contender.name: contender for contender in (HandWritten, RaySGD)}

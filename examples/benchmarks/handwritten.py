"""The loop that people write themselves, with DDP: what raysgd is measured against."""

import os
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Workload

__all__ = ["HandWritten", "Loop"]


class Loop:
    """One rank's model, data and epochs, in a process group that stands already. Reads only the last loss."""

    def __init__(self, workload: Workload, rank: int, workers: int) -> None:
        torch.set_num_threads(1)
        bare = workload.model()
        # gradient_as_bucket_view=True is raysgd's default; it is the faster one, so both have it.
        self.model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
        self.optimizer, self.criterion = workload.optimizer(bare), workload.criterion
        dataset = workload.dataset(workers)
        self.sampler = DistributedSampler(dataset, workers, rank, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=self.sampler)
        self.epochs_completed = 0

    def epoch(self) -> float:
        model, optimizer, criterion = self.model, self.optimizer, self.criterion
        self.sampler.set_epoch(self.epochs_completed)
        model.train()
        for features, target in self.loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
        self.epochs_completed += 1
        return float(loss.detach())


class HandWrittenRank:
    """One rank of the loop that people write themselves, in a Ray actor."""

    def __init__(self, workload: Workload, rank: int, workers: int) -> None:
        self.rank, self.workers, self.workload = rank, workers, workload

    def process(self) -> int:
        return os.getpid()

    def setup(self, host: str, port: int) -> None:
        store = dist.TCPStore(host, port, self.workers, False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.workers)
        self.loop = Loop(self.workload, self.rank, self.workers)

    def epoch(self) -> float:
        return self.loop.epoch()


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

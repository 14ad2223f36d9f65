"""The loop that people write themselves, with DDP: what raysgd is measured against."""

import os
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Setting


class Loop:
    """One rank's model, data and epochs, in a process group that exists already. Reads only the last loss."""

    def __init__(self, setting: Setting, rank: int) -> None:
        torch.set_num_threads(1)
        workload, workers = setting.workload, setting.workers
        self.setting = setting
        bare = workload.model()
        self.model, self.optimizer = self.shared(bare, workload.optimizer(bare))
        self.criterion = workload.criterion
        dataset = workload.dataset(workers)
        self.sampler = DistributedSampler(dataset, workers, rank, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=self.sampler)
        self.epochs_completed = 0

    def shared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrapped so that gradients are averaged over the ranks, where there are several."""
        if self.setting.workers == 1:
            return model, optimizer
        # gradient_as_bucket_view=True is raysgd's default; it is the faster one, so all have it.
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer

    def epoch(self) -> float:
        self.sampler.set_epoch(self.epochs_completed)
        self.epochs_completed += 1
        model, optimizer, criterion = self.model.train(), self.optimizer, self.criterion
        for features, target in self.loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
        return float(loss.detach())


class HandWrittenRank:
    """One rank of the loop that people write themselves, in a Ray actor."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank = setting, rank

    def process(self) -> int:
        return os.getpid()

    def setup(self, host: str, port: int) -> None:
        workers = self.setting.workers
        store = dist.TCPStore(host, port, workers, False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=workers)
        self.loop = Loop(self.setting, self.rank)

    def epoch(self) -> float:
        return self.loop.epoch()


class HandWritten:
    """The hand-written DDP loop in the same kind of processes: Ray actors, one CPU and one thread each."""

    name = "hand-written"

    def __init__(self, setting: Setting) -> None:
        rank_class = ray.remote(HandWrittenRank)
        self._ranks: list[Any] = [
            rank_class.options(num_cpus=1).remote(setting, rank) for rank in range(setting.workers)
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

"""Who takes part in the throughput benchmark. Each trains the same workload, an epoch whenever it is told to.

A contender has `name`, `epoch()` (one epoch, seen from the driver), `processes()` (its workers' ids) and
`stop()`. All keep their workers alive between epochs, and idle while another one trains.
"""

import os
from typing import Protocol

from handwritten import HandWritten
from torch.utils.data import DataLoader
from workloads import Workload

from raysgd import TorchTrainer, TrainingOperator

__all__ = ["CONTENDERS", "BenchmarkOperator", "Contender", "RaySGD"]


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
            train_loader=DataLoader(workload.dataset(workers), batch_size=workload.batch_size, shuffle=True)
        )


class RaySGD:
    """raysgd as it comes: elastic, with progress messages, a snapshot per epoch and metrics over workers."""

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


CONTENDERS = {contender.name: contender for contender in (HandWritten, RaySGD)}

"""Real workers on the late device, with the emulation of NCCL in its stream: hosts that run ahead of all-reduces.

Importing this changes nothing: a worker registers the device."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.emulated.on_late import OnLate

WORKERS, ROWS, BATCH = 3, 96, 4


def install(point: Any = lambda operation, place: None) -> None:
    """Let this process use NCCL on the late device. `point` is that of the emulation's settings."""
    names = "tests.emulated.late_device", "tests.emulated.nccl", "raysgd.torch.group.nccl"
    late, emulation, nccl = [cast("Any", import_module(each)) for each in names]
    emulation.install("late", launch=late.stream.launch, content=late.on_cpu, point=point)
    emulation.EmulatedNccl._device_types = [late.DEVICE]  # where torch sends objects
    nccl.device = lambda: late.DEVICE


@dataclass
class Seen:
    """What a rank has seen in its steps.

    behind  the most operations of a committed step's gradients that the device had not done yet
    waits   how often the host has waited for the device in each step
    """

    behind: int = 0
    waits: list[int] = field(default_factory=list)


class Curve(TrainingOperator):
    """With Adam, in double precision."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2)).double()
        self.register_data(train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH))
        self.seen = Seen()


class LateCurve(OnLate, Curve):
    """Watches the device. `place` is where in the all-reduce of step 3 this process is killed."""

    place: str | None = None

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.stream: Any = import_module("tests.emulated.late_device").stream
        self.needed: dict[int, int] = {}  # launches up to the gradients of each step
        self.waited = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        step, waited, seen = batch_info["global_step"], self.stream.waits.total(), self.seen
        seen.behind = max(seen.behind, self.needed.get(step, 0) - self.stream.done)
        seen.waits.append(waited - self.waited)
        self.waited = waited
        if self.place is not None and step == 3:
            install(lambda operation, place: die() if (operation, place) == ("all_reduce", self.place) else None)
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.needed[step + 1] = self.stream.launched
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def state_of(operator: Any) -> list[torch.Tensor]:
    """Return a rank's weights and Adam's moments."""
    moments = [each[name] for each in operator.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [each.detach().cpu() for each in (*operator.unwrapped().parameters(), *moments)]


def trainer(operator: Any = LateCurve, *, hook: Any = install, backend: Any = "nccl") -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=WORKERS,
        num_cpus_per_worker=0.01,
        use_gpu=False,
        backend=backend,
        initialization_hook=hook,
        elastic=ElasticConfig(grow=False, hang_timeout_s=60),
    )


class Ground:
    """Owns a trainer, and what its ranks have and have seen after an undisturbed epoch."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer, self.before = trainer, trainer.state_dict()
        trainer.train()
        self.expected = trainer.apply_all_operators(state_of)[0]
        self.seen: list[Seen] = trainer.apply_all_operators(lambda operator: operator.seen)

    def train_with_a_kill(self, place: str) -> list[Seen]:
        """Train the same epoch again, in which rank 1 is killed. Return what the others have seen."""
        self.trainer.resize(WORKERS)
        self.trainer.load_state_dict(self.before)

        def prepare(operator: Any) -> None:
            operator.place, operator.seen, operator.needed = place if operator.world_rank == 1 else None, Seen(), {}

        self.trainer.apply_all_operators(prepare)
        self.trainer.train()
        return list(self.trainer.apply_all_operators(lambda operator: operator.seen))

    def difference(self, expected: list[torch.Tensor] | None = None) -> float:
        """Return by how much any rank differs from these tensors, by default those of the undisturbed epoch."""
        ranks = self.trainer.apply_all_operators(state_of)
        pairs = [pair for rank in ranks for pair in zip(rank, expected or self.expected, strict=True)]
        return max(float((one - other).abs().max()) for one, other in pairs)

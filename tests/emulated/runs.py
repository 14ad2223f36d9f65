"""Real workers on the emulation of NCCL, one of which is killed at a point of a collective call, and what the others have then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.peek import models_of, parts_of

ROWS, BATCH = 96, 4
SAME = ("num_samples", "skipped_steps", "ones")  # in the result of each epoch
SPOILED = 41  # of three ranks, rank 1 has it in step 3


def emulation() -> Any:
    """Return the module of the emulation. What is pickled with its content, as this module is, could not contain it."""
    return import_module("tests.emulated.nccl")


@dataclass(frozen=True)
class Hook:
    """The initialization hook that installs the emulation with these settings. With `dies`, the next worker after its file has been made
    is killed as it says. With `abort_s`, a process ends after the first time if its abort hangs, and the last one after their sum."""

    settings: dict[str, Any]
    dies: tuple[Path, Kill] | None = None
    abort_s: tuple[float, float] | None = None

    def __call__(self) -> None:
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
        emulation().install(**self.settings)
        if self.dies is not None and self.dies[0].exists():
            self.dies[0].unlink()
            arm([self.dies[1]])
        if self.abort_s is not None:
            nccl = import_module("raysgd.torch.group.nccl")
            nccl.ABORT_S, nccl.SPREAD_S = self.abort_s


@dataclass(frozen=True)
class Kill:
    """In step `step`, rank `rank` is killed at its call of this number and operation: "before" it, "in" it, when one peer at most has
    what it sends, or "after" it. Without an operation, it is killed `after_s` seconds after the step has begun. Without a step, it has
    begun now. With a `file`, it waits for that before."""

    operation: str = "all_reduce"
    number: int = 0
    place: str = "in"
    rank: int = 1
    step: int | None = 3
    after_s: float = 0.0
    file: Path | None = None

    def strike(self) -> None:
        while self.file is not None and not self.file.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Mark(Kill):
    """Where a kill would strike, this rank only makes the file."""

    def strike(self) -> None:
        assert self.file is not None
        self.file.touch()


class Deadly:
    """Counts the calls of the kind, and lets the kill strike."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._left = kill, kill.number

    def __call__(self, operation: str, place: str) -> None:
        if operation == self._kill.operation:
            if self._left == 0 and place == self._kill.place:
                self._kill.strike()
            self._left -= place == "after"


def nothing(operation: str, place: str) -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Shared(torch.autograd.Function):
    """Needs the other ranks in its backward pass, for a mean of ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * mean_of_ones()


class Synced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Shared.apply(x)
        return found


def mean_of_ones() -> float:
    ones = torch.ones(1, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(ones)
        ones /= dist.get_world_size()
    return float(ones)


def model_of(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    first = nn.Linear(8, 16, bias="norm" not in config)  # which would train on noise, with Adam
    between = [Synced()] if config.get("calls") == "later" else [nn.BatchNorm1d(16)] if config.get("norm") else []
    return nn.Sequential(nn.Sequential(first, *between, nn.Tanh()), nn.Linear(16, 1)).double()


def loader() -> Any:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2)).double()
    return DataLoader(TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True).sin()), batch_size=BATCH)


class Curve(TrainingOperator):
    """In double precision, with Adam. With `config["calls"]`, user code makes collective calls "before" the forward pass, or "later": in
    the backward pass, after it, and after the step. The loss with the sample SPOILED is multiplied by `config["spoils"]`."""

    kills: Sequence[Kill] = ()

    def setup(self, config: dict[str, Any]) -> None:
        model = model_of(config)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        arm([each for each in self.kills if each.step == batch_info["global_step"]])
        index, x, y = batch
        if self.config.get("calls") == "before":
            self.ask_others()
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        if SPOILED in index.tolist():
            loss = loss * self.config.get("spoils", 1)
        self.make_step(loss)
        result = {"train_loss": loss.detach(), "num_samples": len(x)}
        return {**result, "ones": mean_of_ones()} if self.config.get("calls") == "later" else result

    def make_step(self, loss: torch.Tensor) -> None:
        self.zero_grad()
        self.backward(loss)
        if self.config.get("calls") == "later":
            self.ask_others()
        self.step()

    def ask_others(self) -> None:
        if mean_of_ones() != 1:
            raise ZeroDivisionError("an error of user code, because of what a failed peer has left")


def arm(kills: Sequence[Kill]) -> None:
    """Let this process be killed at these calls, which have begun to count, or some time later."""
    for kill in kills:
        if kill.operation:
            emulation().install(point=Deadly(kill))
        elif kill.after_s:
            threading.Timer(kill.after_s, die).start()
        else:
            die()


class OwnStep(Curve):
    def make_step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Changes(Curve):
    """Changes, before its step, all that a step can change."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        state = self.part_state
        state["sum"] = 0.5 * state.get("sum", 0.0) + batch[1].mean()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.97
        bias: Any = self.unwrapped()[1].bias
        bias.data.mul_(0.9)
        index, x, y = batch
        return super().train_batch((index, x + 0.1 * state["sum"], y), batch_info)


class Counts(Curve):
    """Its loss is a mean over 0 to 3 things of each sample."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        arm([each for each in self.kills if each.step == batch_info["global_step"]])
        index, x, y = batch
        things = index % 4
        loss = (things * (self.model(x) - y).squeeze(1) ** 2).sum() / things.sum()
        self.zero_grad()
        self.backward(loss, count=things.sum())
        self.step()
        return {"train_loss": (loss.detach(), things.sum()), "num_samples": len(x)}


def state_of(operator: Any) -> torch.Tensor:
    """Return the weights, buffers, Adam's moments and rate that a rank has."""
    (optimizer,), (model,) = parts_of(operator).optimizers, models_of(operator)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    return torch.cat([each.detach().flatten() for each in [*model.parameters(), *model.buffers(), *moments, *rates]])


def disarm(operator: Any) -> None:
    operator.kills = ()
    emulation().install(point=nothing)


@dataclass
class Ground:
    """Owns a trainer, what its ranks have after an undisturbed epoch, and the state before that. Each of its epochs begins there."""

    trainer: TorchTrainer
    workers: int

    def __post_init__(self) -> None:
        self.before = self.trainer.state_dict()
        self.result = self.trainer.train()
        self.expected = self.states()[0]
        assert not self.trainer.recoveries

    def restore(self) -> None:
        """Return to the state and the workers of the beginning. A kill that has not happened must not happen later."""
        self.trainer.apply_all_operators(disarm)
        self.trainer.resize(self.workers)
        assert self.trainer.world_size == self.workers
        self.trainer.load_state_dict(self.before)

    def lay(self, *kills: Kill) -> None:
        def keep(operator: Any) -> None:
            operator.kills = [each for each in kills if each.rank == operator.world_rank and each.step is not None]
            arm([each for each in kills if each.rank == operator.world_rank and each.step is None])

        self.trainer.apply_all_operators(keep)

    def kill(self, *kills: Kill) -> dict[str, Any]:
        """Train an undisturbed epoch's samples, while these ranks are killed. Check what the survivors have."""
        self.restore()
        before = len(self.trainer.recoveries)
        self.lay(*kills)
        result = self.trainer.train()
        found = self.trainer.recoveries[before:]
        assert sum(len(each.removed_ranks) for each in found) == len(kills), kills
        difference = self.difference()
        assert difference < 1e-15, (difference, kills)
        assert {(each.reason, each.in_place, each.batches_redone) for each in found} == {("worker death", True, 0)}, (
            kills
        )
        assert {name: result.get(name) for name in SAME} == {name: self.result.get(name) for name in SAME}, kills
        return result

    def states(self) -> list[torch.Tensor]:
        """Return what each rank has."""
        return self.trainer.apply_all_operators(state_of)

    def difference(self) -> float:
        """Return by how much any rank differs from the undisturbed run."""
        return max(float((each - self.expected).abs().max()) for each in self.states())


def trainer(
    workers: int = 3, operator: Any = Curve, config: Any = None, elastic: Any = None, **given: Any
) -> TorchTrainer:
    """Return a trainer. By default it keeps the batch of all workers, and starts replacements only in `resize`."""
    backend = given.pop("backend", "nccl")
    hook = Hook(given.pop("emulated", {}), given.pop("dies", None), given.pop("abort_s", None))
    return TorchTrainer(
        training_operator_cls=operator,
        config=config or {},
        num_workers=workers,
        num_cpus_per_worker=0.01,
        use_gpu=False,
        backend=backend,
        initialization_hook=hook if backend == "nccl" else None,
        options=TrainingOptions(**given),
        elastic=ElasticConfig(**{"grow": False, "hang_timeout_s": 60, **(elastic or {})}),
    )

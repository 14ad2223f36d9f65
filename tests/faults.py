"""Faults by (rank, step): each fires once, whoever holds the rank then, and is counted. And an operator that keeps a record.

The ledger is the proof of "each sample exactly once": in every batch the ranks gather the indices of their samples, and
the operator appends them after the optimizer's step. It is part of the operator's state, so it travels with the
weights; what it holds at the end of an epoch is what the weights have seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator
from tests.harming import harm


@dataclass(frozen=True)
class Fault:
    """At global step `step`, the worker with `rank` does `kind`: kill, stop, term, raise, sleep, slow (it pauses in every
    batch from now on, `seconds` each), cut (its connections to the other ranks end: a collective fails without a death), or one
    of those of `tests/harming.py`, with the same names. `others` are processes that a kill takes along.

    Of the faults that a process cannot do to itself, test_fault_kinds.py stops the driver, test_node_failures.py removes
    nodes, test_ray_failures.py kills raylets, and test_loader_processes.py kills the processes of a DataLoader."""

    rank: int
    step: int
    kind: str = "kill"
    where: str = "before"
    seconds: float = 3600.0
    tag: str = ""
    others: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.where}-rank{self.rank}-step{self.step}{self.tag}"

    def fire(self, marks: str) -> None:
        if once(Path(marks, self.name)):
            self.happen()

    def happen(self) -> None:
        if self.kind == "kill":
            for process in (*self.others, os.getpid()):
                os.kill(process, signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "raise":
            raise ZeroDivisionError(f"planned in {self.name}")
        elif self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind != "slow":
            harm({"cut": "collective"}.get(self.kind, self.kind), self.seconds)


def once(mark: Path) -> bool:
    """Return True in the one process that gets to make this file."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill_after(steps: int, seconds: float, process: int, marks: Path) -> None:
    """Kill the process some time after all ranks together have made so many files for their steps."""
    for _ in until(lambda: len(list(marks.glob("step*"))) >= steps):
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)


def until(done: Callable[[], bool], within_s: float = 120.0) -> Iterator[None]:
    """Yield until `done()`: for loops that wait for something. Fail after `within_s` seconds."""
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, f"not within {within_s} s"
        yield


def alive(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    try:
        return b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(*pids: int, within_s: float = 20.0) -> bool:
    """Wait until these processes have ended. Return whether they have."""
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def fired(marks: Path) -> list[str]:
    return sorted(path.name for path in marks.iterdir())


class Numbered(Dataset):  # type: ignore[type-arg]
    """Samples that know their index; the same on every worker."""

    def __init__(self, size: int, *, stuck: Fault | None = None, marks: str = "") -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x @ torch.arange(8.0).unsqueeze(1) / 8 + 0.1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tensor(index), self.x[index], self.y[index]


class LedgerOperator(TrainingOperator):
    """Trains a small linear model on numbered samples, in float64 so that weights can be compared closely."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        loader = DataLoader(
            Numbered(config.get("samples", 240)),
            batch_size=config.get("batch_size", 4),
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
            **config.get("loader", {}),
        )
        validation = DataLoader(Numbered(config.get("val_samples", 50)), batch_size=4)
        self.register_data(train_loader=loader, validation_loader=validation)
        self.ledger: list[int] = []
        self.pending: list[int] = []
        self.optimizer.register_step_post_hook(lambda *_: self.ledger.extend(self.pending))
        self.resizes: list[tuple[int, int]] = []
        self.faults: list[Fault] = config.get("faults", [])
        self.marks: str = config.get("marks", "")

    def fault(self, where: str) -> None:
        for fault in self.faults:
            if fault.where == where and fault.rank == self.world_rank and fault.step <= self.global_step + 1:
                fault.fire(self.marks)
                if fault.kind == "slow":
                    time.sleep(fault.seconds)

    def gathered(self, indices: list[int]) -> list[int]:
        if not dist.is_initialized():
            return indices
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, indices)
        return sorted({index for part in everybody for index in part})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index, x, y = batch
        self.fault("before")
        time.sleep(self.config.get("pace", 0.0))
        indices = self.gathered(index.tolist())
        loss = self.criterion(self.model(x.double()), y.double())
        self.zero_grad()
        if next(self.model.parameters()).grad is None:  # otherwise, this batch shares a step with the one before
            self.pending.clear()
        self.pending.extend(indices)
        self.fault("backward")
        self.backward(loss)
        self.step(self.optimizer)
        self.fault("after")
        return {"train_loss": loss.detach(), "num_samples": len(index)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index, x, y = batch
        self.fault("validate")
        return {"val_loss": self.criterion(self.model(x.double()), y.double()), "num_samples": len(index)}

    def resized(self, old_world_size: int, new_world_size: int) -> None:
        self.fault("resized")
        self.resizes.append((old_world_size, new_world_size))

    def state_dict(self) -> dict[str, Any]:
        self.fault("save")
        return {"ledger": list(self.ledger)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fault("load")
        self.ledger = list(state_dict["ledger"])


class Ground:
    """A trainer over a `LedgerOperator`, the faults laid for it, and the proof of what was trained on."""

    def __init__(self, marks: Path, **arguments: Any) -> None:
        marks.mkdir(parents=True, exist_ok=True)
        self.marks = marks
        config = {"marks": str(marks), **arguments.pop("config", {})}
        self.samples = config.get("samples", 240)
        operator = arguments.pop("operator", LedgerOperator)
        self.trainer = TorchTrainer(training_operator_cls=operator, config=config, **arguments)
        self._seen: Counter[int] = Counter()
        self._armed = 0

    def arm(self, *faults: Fault) -> None:
        """Lays faults for every present worker; their steps count from now."""
        self._armed += 1
        step = self.trainer.apply_all_operators(lambda operator: operator.global_step)[0]
        laid = [replace(fault, step=fault.step + step, tag=f"-{self._armed}") for fault in faults]
        self.trainer.apply_all_operators(lambda operator: setattr(operator, "faults", laid))
        self.laid = laid

    def fired(self) -> int:
        """How many of the last laid faults have fired."""
        return sum((self.marks / fault.name).exists() for fault in self.laid)

    def trained(self) -> Counter[int]:
        """What the weights have seen since the last time; every rank must hold the same."""
        ledgers = self.trainer.apply_all_operators(lambda operator: list(operator.ledger))
        assert all(ledger == ledgers[0] for ledger in ledgers)
        now = Counter(ledgers[0])
        since = now - self._seen
        self._seen = now
        return since

    def assert_epoch_exact(self) -> None:
        seen = self.trained()
        lost, again = (
            [each for each in range(self.samples) if not seen[each]],
            [each for each in seen if seen[each] > 1],
        )
        assert seen == Counter(range(self.samples)), f"lost: {lost}, used more than once: {again}"

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.trainer.get_model().parameters()]

    def whole_again(self, workers: int) -> None:
        """Waits until the replacements have joined."""
        self.trainer.resize(workers)
        assert self.trainer.world_size == workers

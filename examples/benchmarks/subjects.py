"""What chaos.py disturbs: the same training as an operator and as a function, with torch or with Horovod.

Both count the samples that their weights have seen, and obey orders: a file that names what a process shall do to itself.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from counting import CountingOperator, Indexed, lost_and_doubled, small_model
from harming import Injected, harm
from torch.utils.data import DataLoader
from traces import StepTrace

from raysgd import ElasticConfig, TorchTrainer, train
from raysgd.core.audit import AuditError, verify

__all__ = ["SUBJECTS", "Subject", "Training", "changed_line_is_refused", "injected", "order"]

BATCH_SIZE = 8
CHECKPOINT_EVERY = 10


@dataclass(frozen=True)
class Training:
    """What is trained, and where. `disk` is the folder for audit log and checkpoints, `trace` that for steps and orders."""

    backend: str
    workers: int
    samples: int
    step_s: float
    hang_timeout_s: float
    trace: str
    disk: str

    def elastic(self, **more: Any) -> ElasticConfig:
        limits = {"backoff_s": 0.5, "backoff_max_s": 4.0, "max_attempts": 30}
        return ElasticConfig(hang_timeout_s=self.hang_timeout_s, **limits, **more)


class Subject(Protocol):
    """What chaos.py needs from an API."""

    trainer: Any

    def epoch(self) -> None:
        """Train to the end of the epoch, or raise what a fault raised. Another call then trains the rest."""

    def checked(self) -> tuple[int, int, int]:
        """Of the epoch that has ended: samples lost, samples used again, and ranks with other weights than rank 0's."""

    def audited(self) -> dict[str, int]:
        """What `raysgd verify` says. Raises AuditError."""


def order(folder: str, process: int, kind: str, seconds: float, within_s: float = 2.0) -> bool:
    """Have a process do this to itself. False: it took no step, and the order was withdrawn."""
    path, draft = Path(folder) / f"{process}.order", Path(folder) / f"{process}.draft"
    draft.write_text(f"{kind} {seconds}", encoding="utf-8")
    draft.rename(path)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not path.exists():
            return True
        time.sleep(0.01)
    path.unlink(missing_ok=True)
    return False


def obey(folder: str) -> None:
    path = Path(folder) / f"{os.getpid()}.order"
    if path.exists():
        kind, seconds = path.read_text(encoding="utf-8").split()
        path.unlink()
        harm(kind, float(seconds))


def loader(samples: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Indexed(samples), BATCH_SIZE, shuffle=True, generator=generator, num_workers=1)


class Disturbed(CountingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=loader(config["samples"], 1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        obey(self.config["trace"])
        return super().train_batch(batch, batch_info)


class ClassSubject:
    """`TorchTrainer`, with an audit log."""

    def __init__(self, training: Training) -> None:
        self._training = training
        config = {"samples": training.samples, "batch_size": BATCH_SIZE, "step_s": training.step_s}
        self._audit = Path(training.disk) / "audit"
        self.trainer = TorchTrainer(
            training_operator_cls=Disturbed,
            num_workers=training.workers,
            backend={"torch": "gloo"}.get(training.backend, training.backend),
            use_gpu=False,
            config={**config, "trace": training.trace},
            elastic=training.elastic(snapshot_every=20, audit=self._audit, audit_weights_every=25),
        )

    def epoch(self) -> None:
        self.trainer.save(Path(self._training.disk) / "checkpoint.pt")
        self.trainer.train(max_retries=-1)

    def checked(self) -> tuple[int, int, int]:
        return *lost_and_doubled(self.trainer, self._training.samples), 0  # the audit log compares the weights

    def audited(self) -> dict[str, int]:
        verdict = verify(self._audit)
        names = ("steps", "epochs", "samples", "generations", "repeated", "compared")
        return {name: getattr(verdict, name) for name in names}


class FunctionSubject:
    """`raysgd.train.Trainer`. Each epoch is a run that begins from the newest checkpoint."""

    def __init__(self, training: Training) -> None:
        self._training, self._epoch, self._results = training, 0, []
        logdir = Path(training.disk) / "runs"
        elastic = training.elastic()
        self.trainer = train.Trainer(training.backend, training.workers, logdir=logdir, max_retries=-1, elastic=elastic)
        self.trainer.start()

    def epoch(self) -> None:
        config = {**vars(self._training), "epoch": self._epoch}
        self._results = self.trainer.run(counted_epoch, config, checkpoint=self.trainer.latest_checkpoint)
        self._epoch += 1

    def checked(self) -> tuple[int, int, int]:
        lost = doubled = 0
        for result in self._results:
            lost = max(lost, sum(count == 0 for count in result["counts"]))
            doubled = max(doubled, sum(max(0, count - 1) for count in result["counts"]))
        return lost, doubled, sum(result["weights"] != self._results[0]["weights"] for result in self._results)

    def audited(self) -> dict[str, int]:
        return {}  # functions have no audit log


SUBJECTS: dict[str, Callable[[Training], Subject]] = {"class": ClassSubject, "function": FunctionSubject}


def connected(backend: str, model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """What averages gradients, and a function that returns the indices of all ranks."""
    if backend == "torch":
        return train.torch.prepare_model(model), optimizer, gathered
    import horovod.torch as hvd

    hvd.init()
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named), lambda index: hvd.allgather(index)


def gathered(index: torch.Tensor) -> torch.Tensor:
    everybody: list[Any] = [None] * train.world_size()
    dist.all_gather_object(everybody, index)
    return torch.cat(everybody)


def counted_epoch(config: dict[str, Any]) -> dict[str, Any]:
    """An epoch of `Disturbed`, written as a function. `counts` is how often the weights have seen each sample."""
    model, trace = small_model(), StepTrace(config["trace"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = train.torch.elastic_data_loader(loader(config["samples"], 1 + config["epoch"]))
    counts, steps, ended = torch.zeros(config["samples"], dtype=torch.int64), 0, False
    found = train.load_checkpoint()
    if found:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    if found and found["epoch"] == config["epoch"]:
        data.load_state_dict(found["data"])
        counts, steps, ended = found["counts"], found["steps"], found["ended"]
    model_of_all, stepping, everybodys = connected(config["backend"], model, optimizer)
    state = train.elastic({"model": model, "optimizer": optimizer, "data": data, "counts": counts, "steps": steps})
    # If an error was raised after the last save, nothing is left to do. Another loop would be another epoch.
    for index, features, target in () if ended else data:
        obey(config["trace"])
        time.sleep(config["step_s"])
        used = everybodys(index)
        stepping.zero_grad()
        torch.nn.functional.cross_entropy(model_of_all(features), target).backward()
        stepping.step()
        # At the very end of an epoch a sample may be repeated, so that every rank has one.
        used = used.unique() if len(used) <= train.world_size() else used
        state["counts"] += torch.bincount(used, minlength=config["samples"])
        state["steps"] += 1
        trace.step(train.world_rank(), config["epoch"])
        state.commit()
        if state["steps"] % CHECKPOINT_EVERY == 0:
            save(state, model, optimizer, data, epoch=config["epoch"], ended=False)
    save(state, model, optimizer, data, epoch=config["epoch"], ended=True)
    weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    return {"counts": state["counts"].tolist(), "weights": weights}


def save(state: Any, model: Any, optimizer: Any, data: Any, **progress: Any) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    train.save_checkpoint(**parts, counts=state["counts"], steps=state["steps"], **progress)


def injected(error: BaseException) -> bool:
    """Whether a fault raised this: an asynchronous exception, also where it led to another error, or a full disk."""
    led = "harming.Injected" in str(error.__cause__)  # the traceback of the worker
    return led or isinstance(error, Injected) or (isinstance(error, OSError) and "No space left" in str(error))


def changed_line_is_refused(folder: Path) -> bool:
    """Whether the verifier rejects a copy of this audit log in which one digit of one line is another one."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        file = max(Path(copy).iterdir(), key=lambda path: path.stat().st_size)
        lines = file.read_bytes().splitlines(keepends=True)
        middle = len(lines) // 2
        kind, _, rest = lines[middle].partition(b" ")
        lines[middle] = kind + b" 1" + rest
        file.write_bytes(b"".join(lines))
        try:
            verify(Path(copy))
        except AuditError as error:
            return f"line {middle + 1} was changed" in str(error)
    return False

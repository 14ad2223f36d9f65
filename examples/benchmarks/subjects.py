"""What chaos.py disturbs: the same training as an operator and as a function, with torch or with Horovod.

Both count the samples that their weights have seen, and obey orders: a file that names what a process shall do to itself.
"""

import hashlib
import os
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

BATCH_SIZE = 8
CHECKPOINT_EVERY = 10


@dataclass(frozen=True)
class Training:
    """What is trained, and where. `disk` is the folder for logs and checkpoints, `trace` that for steps and orders."""

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
        with open(Path(self.config["disk"]) / f"{os.getpid()}.log", "a", encoding="utf-8") as log:
            log.write(f"{batch_info['global_step']}\n")  # a full disk raises its error here
        return super().train_batch(batch, batch_info)


class ClassSubject:
    """`TorchTrainer`."""

    def __init__(self, training: Training) -> None:
        self._training = training
        config = {"samples": training.samples, "batch_size": BATCH_SIZE, "step_s": training.step_s}
        self.trainer = TorchTrainer(
            training_operator_cls=Disturbed,
            num_workers=training.workers,
            backend={"torch": "gloo"}.get(training.backend, training.backend),
            use_gpu=False,
            config={**config, "trace": training.trace, "disk": training.disk},
            elastic=training.elastic(snapshot_every=20, compare_weights=25, on_divergence="raise"),
        )

    def epoch(self) -> None:
        self.trainer.save(Path(self._training.disk) / "checkpoint.pt")
        self.trainer.train(max_retries=-1)

    def checked(self) -> tuple[int, int, int]:
        first, *others = self.trainer.apply_all_operators(lambda operator: digest_of(operator.model))
        differing = sum(each != first for each in others)
        return *lost_and_doubled(self.trainer, self._training.samples), differing


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
    return {"counts": state["counts"].tolist(), "weights": digest_of(model)}


def save(state: Any, model: Any, optimizer: Any, data: Any, **progress: Any) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    train.save_checkpoint(**parts, counts=state["counts"], steps=state["steps"], **progress)


def digest_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def injected(error: BaseException) -> bool:
    """Whether a fault raised this: an asynchronous exception, also where it led to another error, or a full disk."""
    led = "harming.Injected" in str(error.__cause__)  # the traceback of the worker
    return led or isinstance(error, Injected) or (isinstance(error, OSError) and "No space left" in str(error))

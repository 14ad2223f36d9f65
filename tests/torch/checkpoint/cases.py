"""The trainer on which the file tests of TorchTrainer try files, and how they detect whether a load changed anything."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CheckpointError
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.peek import parts_of

STEPS = 5


class Rich(TrainingOperator):
    """Has all that a checkpoint can contain: buffers, two kinds of optimizers, parameter groups, schedulers, a generator for
    the order of samples, batches that depend on all random states, and its own state."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config.get("seed", 3))
        first, second = nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        adam = torch.optim.Adam(
            [{"params": [first.weight], "lr": 0.02}, {"params": [first.bias], "lr": 0.03, "weight_decay": 0.1}]
        )
        sgd = torch.optim.SGD(second.named_parameters(), lr=0.05, momentum=0.8)
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=[first, second],
            optimizers=[adam, sgd],
            criterion=nn.MSELoss(),
            schedulers=[StepLR(adam, 2), ReduceLROnPlateau(sgd)],
        )
        x = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True, generator=generator))
        self.best: Any = None

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        noise = 0.01 * (random.random() + float(numpy.random.rand()))
        with self.autocast():
            loss = self.criterion(self.models[1](self.models[0](x + noise * torch.rand(x.shape))), y)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(loss)
        for optimizer in self.optimizers:
            self.step(optimizer)
        self.schedulers[0].step()
        self.schedulers[1].step(1.0)
        self.best = min(float(loss.detach()), 1e9 if self.best is None else self.best)
        return {"num_samples": len(x), "loss": loss.detach()}

    def state_dict(self) -> Any:
        return {"best": self.best, "notes": ["a", 1.5]}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]
        if not (self.best is None or isinstance(self.best, float)) or state["notes"][0] != "a":
            raise ValueError("this is no state of mine")


def rich(**arguments: Any) -> TorchTrainer:
    given: dict[str, Any] = {"use_gpu": False, "scheduler_step_freq": "manual", "seed": 9, **arguments}
    return TorchTrainer(training_operator_cls=given.pop("operator", Rich), **given)


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def of_this_rank(operator: Any) -> Any:
    """Return everything that a load may change in one worker."""
    parts = parts_of(operator)
    return copy.deepcopy(
        {
            "models": [model.state_dict() for model in parts.models],
            "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
            "own": operator.state_dict(),
            "global_step": operator.global_step,
        }
    )


PLACE = ("step", "applied", "epoch", "offset", "ended", "parked")


def complete(trainer: TorchTrainer) -> Any:
    """Return the checkpoint's content, without the counters of calls, and the state that each worker has."""
    content = trainer.state_dict()
    for name in ("position", "validation_position", "test_position"):
        content[name] = {key: content[name][key] for key in PLACE}
    return [content, *trainer.apply_all_operators(of_this_rank)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        equal = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return equal and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([nn.utils.parameters_to_vector(model.parameters()) for model in trainer.get_model()]).detach()


def stored(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@dataclass
class Bench:
    """Owns a trainer on which files are tried. `before` is its state, which a refused file must not change. `good` is the
    file that was saved, and `after` is the state after loading it. `expected` has the weights after each further step."""

    trainer: TorchTrainer
    folder: Path
    start: dict[str, Any]
    good: bytes
    before: Any
    after: Any
    expected: list[torch.Tensor]

    def try_file(self, data: bytes, *, trusted: bool = False, gives: Any = None) -> str:
        path = self.folder / "tried.pt"
        path.write_bytes(data)
        return self.try_path(path, trusted=trusted, gives=gives)

    def try_path(self, path: Path, *, trusted: bool = False, gives: Any = None) -> str:
        """Load a file, and return the error, or "identical". Fail if it loads as anything but `gives`, or if a refused file
        changes the trainer. Afterwards the trainer has its earlier state."""
        try:
            self.trainer.load(path, trusted=trusted)
        except CheckpointError as error:
            assert str(path) in str(error) and len(str(error)) > len(str(path)) + 20, error
            assert same(complete(self.trainer), self.before), f"refused, but changed: {error}"
            return str(error)
        now = complete(self.trainer)
        self.back()
        assert same(now, gives or self.after), "it was loaded as something else"
        return "identical"

    def refuses(self, data: bytes, **given: Any) -> str:
        found = self.try_file(data, **given)
        assert found != "identical", "it was loaded"
        return found

    def back(self) -> None:
        self.trainer.load_state_dict(self.start)

    def next_steps_are_right(self) -> None:
        """Check that the refused files have not changed the next training steps."""
        for expected in self.expected:
            self.trainer.train(num_steps=1)
            assert torch.equal(weights(self.trainer), expected)
        self.back()


def bench(folder: Path, **arguments: Any) -> Iterator[Bench]:
    """Train, save, train more, and yield a bench that knows the weights of the following steps."""
    seed_all(5)
    with rich(**arguments) as trainer:
        trainer.train(num_steps=STEPS)
        good = Path(trainer.save(folder / "good.pt")).read_bytes()
        saved = complete(trainer)
        trainer.train(num_steps=3)
        start = trainer.state_dict()
        trainer.load(folder / "good.pt")
        after = complete(trainer)
        assert same(after[:2], saved[:2]), "other ranks' buffers and own states are not in the file"
        trainer.load_state_dict(start)
        before = complete(trainer)
        expected = []
        for _ in range(3):
            trainer.train(num_steps=1)
            expected.append(weights(trainer))
        trainer.load_state_dict(start)
        assert same(complete(trainer), before)
        yield Bench(trainer, folder, start, good, before, after, expected)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at the path. Ordered dictionaries keep their attributes."""
    if not path:
        return new
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new) if path[1:] else new
    return tuple(changed) if isinstance(value, tuple) else changed

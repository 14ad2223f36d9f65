"""Any script with any failures ends as it does undisturbed: weights, rates, counts, rows of the history, orders.

A script is drawn from a seed, and so are the moments at which one worker, all workers, or the script itself is killed. A script
that was killed is started again with `resume="auto"`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.callbacks import EMA, Callback, EarlyStopping
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster
from tests.tiers import NIGHTLY

ROWS = 14
SEEDS = range(1000 if NIGHTLY else 40)
CALLS = ("validate", "test", "predict", "halve", "move", "plateau", "save", "state_dict", "raise", "resize")


class Killed(BaseException):
    """Stands for the end of the script's process."""


@dataclass
class Kills:
    """Counts the points that workers reach. At each of those in `at`, this happens: a rank is killed, "all" or the "script"."""

    at: dict[int, Any] = field(default_factory=dict)
    points: int = 0
    script: bool = False

    def point(self) -> None:
        cluster = Cluster.running
        self.points += 1
        what = self.at.pop(self.points, None)
        if what == "script":
            self.script = True
        elif what is not None:
            here = cluster.here
            dying = [each for each in cluster.workers if what == "all" or each.host.rank == what % len(cluster.workers)]
            for worker in dying:
                if worker is not here:
                    worker.die("SIGKILL")
            if here in dying:
                cluster.hit("kill")


class Ender(Callback):
    def on_progress(self, now: Any) -> None:
        kills: Kills = Cluster.running.notes[0]
        if kills.script:
            kills.script = False
            raise Killed


class Curve(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        manual = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        schedule = manual if config["freq"] == "manual" else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=schedule
        )
        x = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(2)).double()
        data = TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True))
        generator = torch.Generator().manual_seed(4) if config["own"] else None
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        held_out = DataLoader(data, batch_size=3)
        self.register_data(train_loader=loader, validation_loader=held_out, test_loader=held_out)
        self.seen: list[list[int]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        point()
        rows = sorted(row for part in Cluster.running.together(batch[0].tolist()) for row in part)
        result = super().train_batch(batch[1:], batch_info)
        if not self.seen or self.seen[-1][0] != self.global_step:
            self.seen.append([self.global_step])
        self.seen[-1] = [self.global_step, *sorted({*self.seen[-1][1:], *rows})]
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        point()
        return super().validate_batch(batch[1:], batch_info)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        point()
        return self.model(batch[1])

    def state_dict(self) -> Any:
        return [list(each) for each in self.seen]

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = [list(each) for each in state_dict]


def point() -> None:
    Cluster.running.notes[0].point()


def halve(operator: Any) -> None:
    point()
    operator.optimizer.param_groups[0]["lr"] *= 0.5
    point()


def move(operator: Any) -> None:
    with torch.no_grad():
        operator.model[0].weight += 0.125


def failing(trainer: TorchTrainer) -> None:
    def fails(operator: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.apply_all_operators(fails)


@dataclass
class Script:
    """What a seed draws: the trainer, the calls of each body of two loops, and the kills."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.own = draw.random() < 0.5
        self.workers = draw.randint(1, 3)
        self.freq = draw.choice(["manual", "epoch", "batch"])
        self.accumulate = draw.choice([1, 1, 2])
        self.every = draw.choice(["epoch", "epoch", 1, 3, None])
        self.saves = draw.choice(["epoch", 1, 2])
        self.patience = draw.choice([1, 2, 9])
        self.grow = draw.random() < 0.5
        self.limit = draw.choice([None, None, 3])
        self.loops = [(draw.randint(1, 3), self._body(draw)) for _ in range(2)]
        kinds = [0, 1, "all", "all", "script"]
        if self.every is None:
            kinds.remove("script")  # without snapshots, a state that was loaded is lost with all workers
        self.points = [(draw.random(), draw.choice(kinds)) for _ in range(draw.randint(1, 3))]

    def _body(self, draw: random.Random) -> list[str]:
        calls = [call for call in CALLS if call != "plateau" or self.freq == "manual"]
        if self.limit is not None or self.saves != "epoch":
            calls.remove("resize")  # the steps of windows and limits are those of the workers
        before, after = draw.choices(calls, k=draw.randint(0, 2)), draw.choices(calls, k=draw.randint(0, 3))
        return [*before, "train", *after]

    def trainer(self, folder: Path) -> TorchTrainer:
        return TorchTrainer(
            training_operator_cls=Curve,
            config={"freq": self.freq, "own": self.own},
            num_workers=self.workers,
            use_ray=True,
            use_gpu=False,
            seed=5,
            scheduler_step_freq=self.freq,
            options=TrainingOptions(accumulate=self.accumulate),
            elastic=ElasticConfig(hang_timeout_s=60, snapshot_every=self.every, grow=self.grow),
            callbacks=[Ender(), EMA(decay=0.5), EarlyStopping("val_loss", patience=self.patience, min_delta=0.05)],
            checkpoints=AutoCheckpoint(path=folder / "checkpoints", every=self.saves),
            resume="auto",
        )

    def run(self, trainer: TorchTrainer, folder: Path) -> None:
        data = TensorDataset(torch.arange(4), torch.ones(4, 2).double())
        calls: dict[str, Callable[[], Any]] = {
            "train": lambda: trainer.train(self.limit, max_retries=-1),
            "validate": trainer.validate,
            "test": trainer.test,
            "predict": lambda: trainer.predict(data),
            "halve": lambda: trainer.apply_all_operators(halve),
            "move": lambda: trainer.apply_all_operators(move),
            "plateau": lambda: trainer.update_scheduler(1.0),
            "save": lambda: trainer.save(folder / "saved.pt"),
            "state_dict": trainer.state_dict,
            "raise": lambda: failing(trainer),
            "resize": lambda: trainer.resize(self.workers),
        }
        for epochs, body in self.loops:
            for _ in trainer.epochs(epochs):
                for call in body:
                    calls[call]()


def outcome(script: Script, folder: Path, kills: Kills) -> Any:
    with Cluster() as cluster:
        cluster.notes.append(kills)
        while True:
            trainer = script.trainer(folder)
            try:
                script.run(trainer, folder)
                kills.script = False
                return state(trainer)
            except Killed:
                pass
            finally:
                trainer.shutdown(force=True)


def state(trainer: TorchTrainer) -> Any:
    def look(operator: Any) -> Any:
        weights = nn.utils.parameters_to_vector(operator.model.parameters()).tolist()
        return weights, operator.optimizer.param_groups[0]["lr"], operator.seen

    first, *others = trainer.apply_all_operators(look)
    assert all(each == first for each in others)
    averaged = nn.utils.parameters_to_vector(trainer.get_model(averaged=True).parameters()).tolist()
    rows = [
        (row["kind"], row["epoch"], row["step"], row.get("val_loss"), row.get("test_loss")) for row in trainer.history
    ]
    return first, averaged, rows


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("raysgd").disabled = True
    yield
    logging.getLogger("raysgd").disabled = False


def close(value: Any) -> Any:
    """Return what compares numbers closely, also in containers."""
    if isinstance(value, (list, tuple)):
        return type(value)(close(each) for each in value)
    return pytest.approx(value, rel=1e-8, abs=1e-10) if isinstance(value, float) else value


@pytest.mark.parametrize("seed", SEEDS)
def test_any_script_ends_as_it_does_undisturbed(tmp_path: Path, seed: int) -> None:
    script, counted = Script(seed), Kills()
    expected = outcome(script, tmp_path / "undisturbed", counted)
    kills = Kills({1 + int(at * counted.points): what for at, what in script.points})
    assert outcome(script, tmp_path / "disturbed", kills) == close(expected), (script, kills)

"""Any script with any failures ends as it does undisturbed: weights, rates, counts, rows of the history, orders.

A script is drawn from a seed, and so are the moments at which one worker, all workers, or the script itself is killed. A script
that was killed is started again: with `resume="auto"`, with the name of its trainer, or with both. Without a seed and without a
generator of the loader's own, orders differ after a failure, and what does not depend on them is compared.
"""

from __future__ import annotations

import contextlib
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
CALLS = (
    *("validate", "validate some", "test", "predict", "halve", "move", "workers", "plateau"),
    *("save", "load", "state_dict", "raise", "resize"),
)


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

    def end_script(self) -> None:
        if self.script:
            self.script = False
            raise Killed


class Counter(Callback):
    """Adds to each result how many there are, and is where a script ends within a call."""

    results = 0

    def on_resume(self, rows: Any) -> None:
        self.results = len(rows)

    def on_progress(self, now: Any) -> None:
        Cluster.running.notes[0].end_script()

    def extra_metrics(self, result: Any) -> Any:
        self.results += 1
        return {"results": self.results}


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


def nothing() -> None:
    point()


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
        self.number = draw.choice([5, 5, None])
        self.exact = self.own or self.number is not None
        self.kept = draw.choice(["checkpoints", "checkpoints", "name", "both"])
        self.workers = draw.randint(1, 3)
        self.freq = draw.choice(["manual", "epoch", "batch"])
        self.accumulate = draw.choice([1, 1, 2])
        self.every = draw.choice(["epoch", "epoch", 1, 3, None])
        self.saves = draw.choice(["epoch", 1, 2])
        self.patience = draw.choice([1, 2, 9]) if self.exact else 99
        self.grow = draw.random() < 0.5
        self.limit = draw.choice([None, None, 3]) if self.exact else None
        self.loops = [(draw.randint(1, 3), self._body(draw)) for _ in range(2)]
        kinds = [0, 1, "all", "all", "script"]
        if self.every is None:
            kinds.remove("script")  # without snapshots, a state that was loaded is lost with all workers
        # Averages lack what a worker that fails, or the step in which a script with a name ends, has not reported yet.
        self.averages = draw.random() < 0.4 and self.exact and self.kept == "checkpoints"
        if self.averages:
            kinds = [None if self.every is None else "script"]
        self.best = draw.choice([None, "train_loss"]) if self.averages else None
        self.stops = draw.choice(["val_loss", "train_loss"]) if self.averages else "val_loss"
        self.points = [(draw.random(), draw.choice(kinds)) for _ in range(draw.randint(1, 3))]

    def _body(self, draw: random.Random) -> list[str]:
        calls = [call for call in CALLS if call != "plateau" or self.freq == "manual"]
        if self.limit is not None or self.saves != "epoch":
            calls.remove("resize")  # the steps of windows and limits are those of the workers
        before, after = draw.choices(calls, k=draw.randint(0, 2)), draw.choices(calls, k=draw.randint(0, 3))
        return [*before, "train", *after] if draw.random() < 0.8 else []  # of fit()

    def trainer(self, folder: Path) -> TorchTrainer:
        kept: dict[str, Any] = {}
        if self.kept != "name":
            checkpoints = AutoCheckpoint(path=folder / "checkpoints", every=self.saves, best=self.best)
            kept = {"checkpoints": checkpoints, "resume": "auto"}
        stopping = EarlyStopping(self.stops, patience=self.patience, min_delta=0.05)
        return TorchTrainer(
            training_operator_cls=Curve,
            config={"freq": self.freq, "own": self.own},
            num_workers=self.workers,
            use_ray=True,
            use_gpu=False,
            seed=self.number,
            scheduler_step_freq=self.freq,
            options=TrainingOptions(accumulate=self.accumulate),
            elastic=ElasticConfig(hang_timeout_s=60, snapshot_every=self.every, grow=self.grow),
            callbacks=[Counter(), EMA(decay=0.5), stopping],
            name=None if self.kept == "checkpoints" else "script",
            **kept,
        )

    def run(self, trainer: TorchTrainer, folder: Path) -> None:
        data = TensorDataset(torch.arange(4), torch.ones(4, 2).double())
        calls: dict[str, Callable[[], Any]] = {
            "train": lambda: trainer.train(self.limit, max_retries=-1),
            "validate": trainer.validate,
            "validate some": lambda: trainer.validate(num_steps=1),
            "test": trainer.test,
            "predict": lambda: trainer.predict(data),
            "halve": lambda: trainer.apply_all_operators(halve),
            "move": lambda: trainer.apply_all_operators(move),
            "workers": lambda: trainer.apply_all_workers(nothing),
            "plateau": lambda: trainer.update_scheduler(1.0),
            "save": lambda: trainer.save(folder / "saved.pt"),
            "load": lambda: trainer.load(folder / "first.pt"),
            "state_dict": trainer.state_dict,
            "raise": lambda: failing(trainer),
            "resize": lambda: trainer.resize(self.workers),
        }
        if not (folder / "first.pt").exists():
            trainer.save(folder / "first.pt")
        for epochs, body in self.loops:
            if not body:
                trainer.fit(epochs, num_steps=self.limit, max_retries=-1, progress=False)
            for _ in trainer.epochs(epochs) if body else ():
                for call in body:
                    calls[call]()
                    Cluster.running.notes[0].end_script()


def outcome(script: Script, folder: Path, kills: Kills) -> Any:
    with Cluster() as cluster:
        cluster.notes.append(kills)
        while True:
            with contextlib.suppress(Killed), script.trainer(folder) as trainer:
                script.run(trainer, folder)
                kills.script = False
                return state(trainer, script)


def state(trainer: TorchTrainer, script: Script) -> Any:
    def look(operator: Any) -> Any:
        weights = nn.utils.parameters_to_vector(operator.model.parameters()).tolist()
        return weights, operator.optimizer.param_groups[0]["lr"], operator.seen

    first, *others = trainer.apply_all_operators(look)
    assert all(each == first for each in others)
    averaged = nn.utils.parameters_to_vector(trainer.get_model(averaged=True).parameters()).tolist()
    named = ["kind", "epoch", "step", "results", "num_samples"]
    named += ["val_loss", "test_loss"] * script.exact + ["train_loss"] * script.averages
    rows = [tuple(row.get(name) for name in named) for row in trainer.history]
    if not script.exact:
        return first[1], [(step, len(samples)) for step, *samples in first[2]], rows
    return first, averaged, rows, Path(trainer.best_checkpoint or "").name


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


PLAIN: dict[str, Any] = dict(
    own=True,
    number=5,
    exact=True,
    averages=False,
    kept="checkpoints",
    workers=2,
    freq="epoch",
    accumulate=1,
    every="epoch",
    saves=1,
    best=None,
    stops="val_loss",
    patience=9,
    grow=True,
    limit=None,
    points=[],
)
# The smallest scripts of what random ones have found.
FOUND: dict[str, tuple[list[tuple[int, list[str]]], dict[str, Any], dict[int, Any]]] = {
    "a state from before the first epoch had no generators": (
        [(1, ["train", "load"]), (1, ["train"])],
        {},
        {11: "all"},
    ),
    "a change that raised an error let all calls after it be made twice": (
        [(1, ["raise", "train", "test"])],
        {"kept": "name"},
        {10: "script"},
    ),
    "a trainer with checkpoints took no workers over": ([(2, ["train"])], {"kept": "both"}, {12: "script"}),
    "a resumed epoch in which all workers failed lost its counts": ([(1, ["train"])], {}, {5: "script", 9: "all"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_scripts_that_ended_otherwise(tmp_path: Path, name: str) -> None:
    loops, given, kills = FOUND[name]
    script = Script(0)
    vars(script).update(PLAIN | given, loops=loops)
    expected = outcome(script, tmp_path / "undisturbed", Kills())
    assert outcome(script, tmp_path / "disturbed", Kills(dict(kills))) == close(expected)

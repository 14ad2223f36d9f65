"""Any script with any failures ends as it does undisturbed: weights, rates, counts, rows of the history, orders.

A script is drawn from a seed, and so are the moments at which one worker, all workers, or the script itself is killed. A script
that was killed is started again: with `resume="auto"`, with the name of its trainer, or with both. Without a seed and without a
generator of the loader's own, orders differ after a failure, and what does not depend on them is compared.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.callbacks import Callback, EarlyStopping
from raysgd.errors import ConfigError
from raysgd.torch import TrainingOperator
from raysgd.trainer.named import NamedCalls
from tests.local.group import Cluster
from tests.tiers import NIGHTLY

pytestmark = pytest.mark.usefixtures("quiet")

ROWS = 14
BREAKS = 2  # the batch of an epoch in which "break" raises an error
SEEDS = range(1000 if NIGHTLY else 20)
CALLS = (
    *("validate", "validate some", "test", "predict", "halve", "move", "workers", "plateau"),
    *("save", "load", "state_dict", "raise", "resize", "fewer", "break", "break one"),
    *("fail in training", "fail in validation"),
)


class Killed(BaseException):
    """Stands for the end of the script's process."""


@dataclass
class Kills:
    """Counts the points that workers reach. At each of those in `at`, this happens: a rank is killed, "all", the worker that is
    "here", or the "script"."""

    at: dict[int, Any] = field(default_factory=dict)
    everywhere: bool = True
    points: int = 0
    script: bool = False

    def point(self, *, beside: bool = False) -> None:
        """Come to a point; `beside` batches and functions, only if it counts `everywhere`."""
        if beside and not self.everywhere:
            return
        cluster = Cluster.running
        self.points += 1
        what = self.at.pop(self.points, None)
        if what == "script":
            self.script = True
        elif what is not None:
            here = cluster.here
            dying = [each for each in cluster.workers if what == "all" or each is here]
            if isinstance(what, int):
                dying = [each for each in cluster.workers if each.host.rank == what % len(cluster.workers)]
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
        point(beside=True)
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
        self.drawn: dict[int, set[int]] = {}  # of batches whose step has not been made

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        fail(batch_info)
        point()
        rows = [row for part in Cluster.running.together(batch[0].tolist()) for row in part]
        if batch_info["epoch_batch"] == BREAKS and batch_info["part"] in batch_info.get("breaks", ()):
            raise ZeroDivisionError
        self.drawn.setdefault(self.global_step, set()).update(rows)
        return super().train_batch(batch[1:], batch_info)

    def on_step(self, info: dict[str, Any]) -> None:
        self.seen += [[step, *sorted(rows)] for step, rows in sorted(self.drawn.items())]
        self.drawn = {}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        fail(batch_info)
        point()
        return super().validate_batch(batch[1:], batch_info)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        point()
        return self.model(batch[1])

    def state_dict(self) -> Any:
        point(beside=True)
        return [list(each) for each in self.seen]

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen, self.drawn = [list(each) for each in state_dict], {}


def point(*, beside: bool = False) -> None:
    Cluster.running.notes[0].point(beside=beside)


class Mistake(Exception):
    """Raised by the user's code."""


def fail(batch_info: dict[str, Any]) -> None:
    if batch_info.get("fails") and batch_info["batch_idx"] == 2:  # where a window begins
        raise Mistake


def failing_in(call: Callable[..., Any], *given: Any, **more: Any) -> None:
    with contextlib.suppress(Mistake):  # the rest of an epoch may be shorter
        call(*given, info={"fails": True}, **more)


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


def breaking(trainer: TorchTrainer, parts: Sequence[int]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        trainer.train(max_retries=-1, info={"breaks": list(parts)})


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
        kinds = [0, 1, "here", "all", "all", "script"]
        if self.every is None:
            kinds.remove("script")
        # Averages lack what a worker that fails, or the step in which a script with a name ends, has not reported yet.
        self.averages = draw.random() < 0.4 and self.exact and self.kept == "checkpoints"
        if self.averages:
            kinds = [None if self.every is None else "script"]
        self.best = draw.choice([None, "train_loss"]) if self.averages else None
        self.stops = draw.choice(["val_loss", "train_loss"]) if self.averages else "val_loss"
        if self.kept != "checkpoints" and any("break" in call for _, body in self.loops for call in body):
            kinds = [each for each in kinds if each != "script"]
        self.points = [(draw.random(), draw.choice(kinds)) for _ in range(draw.randint(1, 3))]

    def _body(self, draw: random.Random) -> list[str]:
        calls = [call for call in CALLS if call != "plateau" or self.freq == "manual"]
        if self.every is None:
            calls.remove("load")  # without snapshots, a state that was loaded is lost with all workers
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
            callbacks=[Counter(), stopping],
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
            "fail in training": lambda: failing_in(trainer.train, self.limit, max_retries=-1),
            "fail in validation": lambda: failing_in(trainer.validate),
            "resize": lambda: trainer.resize(self.workers),
            "fewer": lambda: trainer.resize(max(1, self.workers - 1)),
            "break": lambda: breaking(trainer, range(self.workers)),
            "break one": lambda: breaking(trainer, [0]),
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
    named = ["kind", "epoch", "step", "results", "num_samples"]
    named += ["val_loss", "test_loss"] * script.exact + ["train_loss"] * script.averages
    rows = [tuple(row.get(name) for name in named) for row in trainer.history]
    if not script.exact:
        return first[1], [(step, len(samples)) for step, *samples in first[2]], rows
    return first, rows, Path(trainer.best_checkpoint or "").name


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
    "a call that failed in training let all calls after it be made twice": (
        [(1, ["fail in training", "halve", "train", "train"])],
        {"kept": "name"},
        {8: "script"},
    ),
    "a call that failed in training was made again": (
        [(1, ["fail in training", "halve", "train"])],
        {"kept": "name", "limit": 3},
        {7: "script"},
    ),
    "all workers failed after a call that failed in training, and its steps were lost": (
        [(1, ["fail in training", "train"])],
        {"limit": 3},
        {8: "all"},
    ),
    "a trainer with checkpoints took no workers over": ([(2, ["train"])], {"kept": "both"}, {12: "script"}),
    "a call that an error had ended was trained to the end of its epoch when it was made again": (
        [(1, ["break", "train"])],
        {"workers": 1},
        {5: "all"},
    ),
    "a call that was made again had checkpoints of the call after it": (
        [(2, ["break one", "train"])],
        {"every": None, "limit": 3},
        {14: "all"},
    ),
    "a failure while the first epoch began left numbers that it had drawn in the snapshot": (
        [(1, ["train"])],
        {"workers": 3, "everywhere": True},
        {5: 0, 11: "all"},
    ),
    "a script that was killed after an error that it had caught took the next call for that with the error": (
        [(1, ["fail in training", "train", "train"])],
        {"kept": "name", "limit": 3},
        {7: "script"},
    ),
    "a snapshot lacked that its batch was the last one of an epoch, and its schedule a step": (
        [(1, ["fail in training", "train", "fail in training", "train"])],
        {"every": 1, "limit": 3, "workers": 3, "accumulate": 2},
        {24: "all"},
    ),
    "a resumed epoch in which all workers failed lost its counts": ([(1, ["train"])], {}, {5: "script", 9: "all"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_scripts_that_ended_otherwise(tmp_path: Path, name: str) -> None:
    loops, given, kills = FOUND[name]
    script = Script(0)
    vars(script).update(PLAIN | given, loops=loops)
    expected = outcome(script, tmp_path / "undisturbed", Kills())
    everywhere = given.get("everywhere", False)
    assert outcome(script, tmp_path / "disturbed", Kills(dict(kills), everywhere)) == close(expected)


def passing_on(trainer: TorchTrainer, fails: bool = False, error: type[Exception] | None = None) -> None:
    """Validate also after an error of training, which is not caught."""
    for _ in trainer.epochs(2):
        try:
            trainer.train(info={"fails": fails})
        except Mistake as mistake:
            trainer.validate()
            raise (error or Mistake) from (mistake if error else None)
        trainer.validate()


def end_with(trainer: TorchTrainer) -> None:
    with trainer:
        passing_on(trainer, fails=True)


def end_with_another_error(trainer: TorchTrainer) -> None:
    with trainer:
        passing_on(trainer, fails=True, error=ZeroDivisionError)


def end_without(trainer: TorchTrainer) -> None:
    try:
        passing_on(trainer, fails=True)
    except Mistake as error:
        sys.last_value = error
        cast(NamedCalls, trainer._calls)._at_exit()
        raise


def end_a_cell(trainer: TorchTrainer) -> None:
    """The kernel is killed after the next one."""
    try:
        for _ in trainer.epochs(2):
            trainer.train(info={"fails": True})
    except Mistake as error:
        sys.last_value = error
    with trainer:
        trainer.validate()
        raise Killed


@pytest.mark.parametrize("end", [end_with, end_with_another_error, end_without, end_a_cell])
def test_an_error_that_has_ended_a_script_is_not_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[TorchTrainer], None]
) -> None:
    """With repaired code, the next script trains the rest of the epoch."""
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    script, found = Script(0), []
    vars(script).update(PLAIN | {"kept": "name"})
    for ends in (None, end):
        with Cluster() as cluster:
            cluster.notes.append(Kills())
            if ends is not None:
                with pytest.raises((Mistake, ZeroDivisionError, Killed)):
                    ends(script.trainer(tmp_path))
            with script.trainer(tmp_path) as trainer:
                passing_on(trainer)
                found.append(state(trainer, script))
    assert found[1][0] == close(found[0][0])
    assert [row[:3] for row in found[1][1]] == [("validate", 1, 2), *[row[:3] for row in found[0][1]]]


def test_a_load_before_the_loop_would_replace_the_state_that_was_taken_over(tmp_path: Path) -> None:
    """A script that died before its loop may load again."""
    script = Script(0)
    vars(script).update(PLAIN | {"kept": "name"})
    first = tmp_path / "first.pt"
    with Cluster() as cluster:
        cluster.notes.append(Kills())
        for refused in (False, False, True):
            with contextlib.suppress(Killed), script.trainer(tmp_path) as trainer:
                if refused:
                    with pytest.raises(ConfigError, match=r"load\(\) would replace .* `if not trainer.attached:`"):
                        trainer.load(first)
                else:
                    trainer.load(trainer.save(first))
                    for _ in trainer.epochs(2 * trainer.attached):
                        trainer.train()
                        raise Killed
                raise Killed
        with script.trainer(tmp_path) as trainer:
            steps = [trainer.train()["batch_count"] for _ in trainer.epochs(2)]
    assert steps == [4, 4]

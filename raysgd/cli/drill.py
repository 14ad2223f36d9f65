"""Train a user's operator undisturbed, and again while its workers get signals, and compare:
`raysgd drill`. Driver."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from raysgd.callbacks.base import Callback, Run, Underway
from raysgd.cli.printing import Finding, show
from raysgd.config import ElasticConfig, at_least
from raysgd.core.decisions.policy import Recovery
from raysgd.errors import ConfigError, counted, described, shown

# Each with the rank that gets it. What only rank 0 has made in `setup`, its successor does not have.
SIGNALS = ((signal.SIGKILL, 0), (signal.SIGSTOP, -1), (signal.SIGTERM, 0))
# A laptop has fewer cores than the drill has workers and replacements.
TRAINER = {"num_workers": 2, "num_cpus_per_worker": 0.01, "use_gpu": False, "seed": 0}
ELASTIC = {"hang_timeout_s": 10.0, "on_divergence": "raise"}
EXAMPLE = "for example --set scheduler_step_freq=batch, --set config.lr=0.1 or --set elastic.hang_timeout_s=60"
STRIKE_AT = 1 / 3  # of a call
LEAVES_S = 60.0
TOLERANCE = 1e-3  # of the norm of all weights, or of a sample's: what rounding adds up to stays below it
NOT_MEASURED = (
    "That needs a train_batch that calls self.backward(loss), and a DataLoader of a data set with __getitem__"
)
UNEQUAL = "Write in train_batch what the log asks for, if it does, and seed all random numbers"
OF_THE_DRILL = ("growth", "shrink")  # the changes that it makes itself
LOST = "Return it from state_dict(), and restore it in load_state_dict(); or pass --ignore {}"


def load_operator(place: str) -> Any:
    """Load the operator class that `SCRIPT:Operator` or `module:Operator` names."""
    from raysgd.torch import TrainingOperator

    name, _, attribute = place.rpartition(":")
    path, is_script = Path(name).resolve(), name.endswith(".py")
    if not name or not attribute:
        raise ConfigError(f"the operator must be SCRIPT:CLASS or MODULE:CLASS, got {place!r}: pass train.py:Digits")
    if is_script and not path.is_file():
        raise ConfigError(f"cannot find the file {name!r}: pass the path of the script that defines {attribute}")
    sys.path.insert(0, str(path.parent) if is_script else os.getcwd())  # the workers import from there, too
    module = vars(importlib.import_module(path.stem if is_script else name))
    operators = {n: v for n, v in module.items() if isinstance(v, type) and issubclass(v, TrainingOperator)}
    if attribute not in operators:
        others = ", ".join(sorted(operators.keys() - {"TrainingOperator"})) or "none"
        raise ConfigError(f"{name} has no subclass of raysgd.TrainingOperator named {attribute!r}. It has: {others}")
    return operators[attribute]


def trainer_arguments(settings: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of TorchTrainer that `NAME=VALUE` and `NAME.FIELD=VALUE` set."""
    from raysgd.torch import TrainingOptions

    arguments: dict[str, Any] = {**TRAINER, "elastic": dict(ELASTIC)}
    for each in settings:
        name, equals, text = each.partition("=")
        *groups, last = name.split(".")
        place: Any = arguments
        for group in groups:
            place = place.setdefault(group, {}) if isinstance(place, dict) else None
        if not equals or not last or not isinstance(place, dict):
            raise ConfigError(f"--set must be NAME=VALUE or NAME.FIELD=VALUE, got {each!r}: pass {EXAMPLE}")
        try:
            place[last] = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
        except ValueError:
            place[last] = text
    at_least("num_workers", arguments["num_workers"], 2, whole=True)
    for name, kind in (("elastic", ElasticConfig), ("options", TrainingOptions)):
        if name in arguments:
            arguments[name] = kind(**arguments[name])
    if "fsdp" in (arguments.get("parallel"), getattr(arguments.get("options"), "parallel", None)):
        raise ConfigError(
            "the drill compares runs that continue in place, and a sharded model continues from its newest checkpoint: leave "
            "parallel=fsdp out. Your operator trains the same without it"
        )
    return arguments


@dataclass
class Trained:
    """What a training has shown; `unrest` are the unplanned changes of workers in each call."""

    samples: list[int] = field(default_factory=list)
    position: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    entered: Any = None  # the weight of each sample; 0 where none was measured
    counters: list[dict[str, int]] = field(default_factory=list)
    unrest: list[list[Recovery]] = field(default_factory=list)


class Striker(Callback):
    """Sends a signal to a worker's process in the middle of the next call, if `armed` is set."""

    def __init__(self) -> None:
        self.armed: tuple[signal.Signals, int] | None = None
        self.hit = 0
        self._processes: Callable[[], Sequence[tuple[str, int]]] = tuple

    def on_start(self, run: Run) -> None:
        self._processes = run.processes

    def on_progress(self, now: Underway) -> None:
        if now.progress.batches > now.progress.expected * STRIKE_AT:
            self.strike()

    def strike(self) -> None:
        if self.armed is not None:
            (number, rank), self.armed = self.armed, None
            _, self.hit = self._processes()[rank]
            os.kill(self.hit, number)


def train(
    operator: Any, arguments: Mapping[str, Any], calls: int, steps: int | None, *, workers: int, struck: bool = False
) -> Trained:
    """Train on so many workers. If `struck`, one gets a signal in each call but the last."""
    from raysgd.torch import TorchTrainer
    from raysgd.torch.step.parts.witness import watched

    striker, result = Striker(), Trained()
    with TorchTrainer(**{**arguments, "training_operator_cls": watched(operator), "callbacks": [striker]}) as trainer:
        trainer.resize(workers)
        for call in range(calls):
            before = len(trainer.recoveries)
            if struck and call < calls - 1:
                striker.armed = SIGNALS[call % len(SIGNALS)]
            result.samples.append(trainer.train(steps, max_retries=-1).get("num_samples", 0))
            striker.strike()  # if the call was too short
            until = time.monotonic() + LEAVES_S
            while striker.hit in trainer.apply_all_workers(os.getpid) and time.monotonic() < until:
                time.sleep(0.2)
            trainer.resize(workers)
            result.unrest.append([each for each in trainer.recoveries[before:] if each.reason not in OF_THE_DRILL])
        state = trainer.state_dict()
        result.position = {name: state[name] for name in ("epoch", "global_step")}
        for number, each in enumerate(state.get("schedulers") or ()):
            result.position[f"last_epoch of scheduler {number}"] = each.get("last_epoch")
        *models, witness = state["models"]
        result.entered = witness["entered"]
        for number, model in enumerate(models):
            result.weights |= {f"{number}.{name}": value for name, value in model.items()}
        result.counters = trainer.apply_all_operators(  # a lambda, so that workers need not import this module
            lambda operator: {n: value for n, value in vars(operator).items() if type(value) is int and n[0] != "_"}
        )
    return result


def distance(one: Trained, other: Trained) -> float:
    """Compute how far the weights are apart, as a part of the norm of the first ones."""
    floats = {name: value.double() for name, value in one.weights.items() if value.is_floating_point()}
    total = sum(float(value.square().sum()) for value in floats.values())
    apart = sum(float((value - other.weights[name].double()).square().sum()) for name, value in floats.items())
    return float((apart / max(total, sys.float_info.min)) ** 0.5)


def compare(calm: Trained, alone: Trained, struck: Trained, ignored: Sequence[str]) -> Iterator[Finding]:
    """Judge a training under faults by one without. What differs between that one and `alone`,
    which was trained on one worker, depends on the workers or on chance, and cannot be judged."""
    for call, recoveries in enumerate(struck.unrest[:-1]):
        name = SIGNALS[call % len(SIGNALS)][0].name
        followed = ", ".join(f"{each.reason} after batch {each.batch}" for each in recoveries) or "the worker stayed"
        todo = "" if recoveries else "Do not handle this signal in your code, or call the handler that was there before"
        yield Finding("faults", f"{name} in call {call + 1}: {followed}", todo)
    yield judge_samples(calm, alone, struck)
    todo = (
        "Let the trainer step registered schedulers (scheduler_step_freq), and train in train_batch or train_epoch only"
    )
    here, there = (", ".join(f"{name} {value}" for name, value in each.position.items()) for each in (struck, calm))
    yield (
        Finding("position", here, "") if here == there else Finding("position", f"{here}; without faults {there}", todo)
    )
    yield judge_weights(distance(calm, struck), distance(calm, alone))
    lost = {
        name: f"self.{name} is {mine.get(name)} on rank {rank}, and {count} without faults"
        for rank, (mine, theirs) in enumerate(zip(struck.counters, calm.counters, strict=True))
        for name, count in theirs.items()
        if mine.get(name, 0) < count <= alone.counters[0].get(name, 0) and name not in ignored
    }
    yield from [Finding("state", text, LOST.format(name)) for name, text in lost.items()]
    if not lost:
        yield Finding("state", "no whole number among the operator's attributes was set back")


def judge_samples(calm: Trained, alone: Trained, struck: Trained) -> Finding:
    """Judge how many samples were counted, and how often each has entered the weights."""
    todo = "Use the iterator that train_epoch gets, and let the errors of collective calls pass"
    if struck.samples != calm.samples:
        return Finding("samples", f"{struck.samples}, and {calm.samples} without faults", todo)
    text, least = f"{sum(struck.samples):,}, as without faults", TOLERANCE * calm.entered
    if not (calm.entered.any() and struck.entered.any()):
        return Finding("samples", f"{text}; which ones was not measured", NOT_MEASURED, fails=False)
    if ((alone.entered - calm.entered).abs() > least).any():
        return Finding("samples", f"{text}; which ones depends on the workers or on chance", UNEQUAL, fails=False)
    differ = {"lost": calm.entered - struck.entered > least, "doubled": struck.entered - calm.entered > least}
    rows = [f"{how} {shown(each.nonzero().flatten().tolist())}" for how, each in differ.items() if each.any()]
    return Finding("samples", f"{text}, but {'; '.join(rows)}" if rows else f"{text}, each as often", todo * bool(rows))


def judge_weights(apart: float, natural: float) -> Finding:
    """Judge weights by their distance to those without faults; workers alone cause `natural`."""
    text = f"the difference to those without faults is {apart:.1g} of their norm"
    if natural > TOLERANCE:
        text += f", and on one worker, without faults, {natural:.1g}: they depend on the workers or on chance"
        return Finding("weights", text, UNEQUAL, fails=False)
    todo = "Return what influences training from state_dict(), and let the errors of collective calls pass"
    return Finding("weights", text, todo if apart > TOLERANCE else "")


def drill(
    operator: Any, arguments: Mapping[str, Any], calls: int, steps: int | None, ignored: Sequence[str]
) -> Iterator[Finding]:
    """Train three times, and yield what was found."""
    number, what = arguments["num_workers"], "without faults"
    try:
        calm = train(operator, arguments, calls, steps, workers=number)
        seen = f"{counted(sum(calm.samples), 'sample')} in {counted(calls, 'call')} on {counted(number, 'worker')}"
        yield Finding("training", f"{seen} without faults")
        what = "without faults, on one worker"
        alone = train(operator, arguments, calls, steps, workers=1)
        what = "with faults"
        struck = train(operator, arguments, calls, steps, workers=number, struck=True)
    except Exception as error:  # the user's code may raise anything
        todo = f"Correct that. --set passes arguments to TorchTrainer, {EXAMPLE}"
        yield Finding("training", f"{what}, it ended with {described(error)}".partition("\n")[0], todo)
        return
    for each in [each for call in (*calm.unrest, *alone.unrest) for each in call]:
        todo = "Correct that; a batch that takes longer than 10 s needs --set elastic.hang_timeout_s=60"
        yield Finding("training", f"a worker was lost without a fault: {each.detail}", todo)
    yield from compare(calm, alone, struck, ignored)


@click.command("drill", short_help="Train an operator under faults, and compare.")
@click.argument("operator", metavar="SCRIPT:OPERATOR")
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="An argument of TorchTrainer. Repeatable.")
@click.option("--calls", default=4, show_default=True, type=click.IntRange(min=4), help="How often to call train().")
@click.option("--steps", type=click.IntRange(min=1), help="Steps in each call.  [default: to the end of the epoch]")
@click.option("--ignore", multiple=True, help="An attribute of the operator that may be lost. Repeatable.")
def command(operator: str, settings: tuple[str, ...], calls: int, steps: int | None, ignore: tuple[str, ...]) -> None:
    """Train an operator of your script while its workers get signals, on this machine, and compare
    with an undisturbed run.

    OPERATOR is a subclass of raysgd.TrainingOperator in a SCRIPT (train.py) or in a module
    (package.module), which is imported: what it runs must be under `if __name__ == "__main__":`.
    Values of --set are JSON, text or @FILE with JSON."""
    os.environ["RAY_ADDRESS"] = "local"  # the workers of a cluster that others use must not be killed
    try:
        show(drill(load_operator(operator), trainer_arguments(settings), calls, steps, ignore))
    except (ConfigError, ImportError, OSError, TypeError) as error:
        raise click.ClickException(str(error)) from error

"""Train a user's operator under seeded faults, and say what it does wrong: `raysgd drill`. Driver."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback
from raysgd.cli.findings import Finding
from raysgd.config import ElasticConfig
from raysgd.core.policy import Recovery
from raysgd.errors import ConfigError, DivergenceError, causes_of, described

__all__ = ["KINDS", "NAMES", "Drill", "Record", "findings", "load_operator"]

KINDS = ("kill", "notice", "memory", "stop", "gil")
NAMES = {
    "kill": "killed process(es)",
    "notice": "preemption notice(s)",
    "memory": "memory error(s)",
    "stop": "stopped process(es)",
    "gil": "held GIL(s)",
}
RECENT_S, LOOK_S, LOOK_EVERY_S, OBEY_S, CALL_S = 2.0, 0.05, 3.0, 5.0, 8.0
WARM_STEPS, COMPARED_EVERY = 3, 5
CPUS = 0.01  # a laptop has fewer cores than the drill has workers
GIL_PART = 1.5  # of the hang limit
TRIES = 3
STATE_ADVICE = (
    "Return it from state_dict(), and restore it in load_state_dict(); if it need not survive, pass --ignore {name}"
)
RETRIES = 20
LONGEST_ERROR = 160


def load_operator(place: str) -> Any:
    """Return the class that `SCRIPT:Operator` or `module:Operator` names. Raise ConfigError if it is not an operator's."""
    from raysgd.torch import TrainingOperator

    name, colon, attribute = place.rpartition(":")
    if not colon or not name or not attribute:
        raise ConfigError(f"expected SCRIPT:Operator or module:Operator, got {place!r}: for example train.py:Digits")
    path = Path(name).resolve()
    if name.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"there is no file {name!r}: pass the path of the script that defines {attribute}")
        sys.path.insert(0, str(path.parent))  # the workers import from there, too
        name = path.stem
    else:
        sys.path.insert(0, os.getcwd())
    operator: Any = importlib.import_module(name)
    for each in attribute.split("."):
        if not hasattr(operator, each):
            classes = [n for n, v in vars(operator).items() if isinstance(v, type) and issubclass(v, TrainingOperator)]
            found = ", ".join(n for n in classes if n != TrainingOperator.__name__) or "none"
            raise ConfigError(f"{name} has no {each!r}. Its operators are: {found}")
        operator = getattr(operator, each)
    if not (isinstance(operator, type) and issubclass(operator, TrainingOperator)):
        raise ConfigError(f"{place} must be a subclass of raysgd.TrainingOperator, got {operator!r}")
    return operator


@dataclass(frozen=True)
class Fault:
    """When a fault began (monotonic), its kind, and the process that it hit."""

    at: float
    kind: str
    pid: int


@dataclass
class Record:
    """What was seen in a drill. `findings` judges it.

    replaced, unrestored  for each attribute: how many replacement workers should have received it, and how many did not
    swallowed             errors of peers that the operator did not pass on
    hangs                 what raysgd says about ranks that it killed although no fault made them hang
    differing             how the ranks' weights differ
    given_up              for each kind: how often no process got it in several attempts
    data                  for each look: of each worker, the epoch, the length of its training data, and a digest of some samples
    """

    hang_s: float
    workers: int
    faults: list[Fault] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    replaced: Counter[str] = field(default_factory=Counter)
    unrestored: Counter[str] = field(default_factory=Counter)
    replacements: int = 0
    swallowed: list[Mapping[str, str]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    data: list[list[tuple[int, int, str]]] = field(default_factory=list)
    error: str = ""
    differing: str = ""
    given_up: Counter[str] = field(default_factory=Counter)


# -- what the record means ----------------------------------------------------------------------------


def findings(record: Record, ignored: Sequence[str] = ()) -> Iterator[Finding]:
    """Judge a drill. There is at least one finding for each check."""
    counts = Counter(fault.kind for fault in record.faults)
    done = ", ".join(f"{counts[kind]} {NAMES[kind]}" for kind in KINDS if counts[kind]) or "none"
    recovered = Counter(each.reason for each in record.recoveries)
    seen = ", ".join(f"{count} {reason}" for reason, count in recovered.items()) or "none"
    if record.error:
        yield Finding(
            "training", f"it ended with {record.error}", "Correct that, and repeat the drill with the same --seed"
        )
    else:
        yield Finding("training", f"faults: {done}. Recoveries: {seen}")
    if not record.error:
        yield from _faults(record, counts)
    yield from _state(record, ignored)
    yield from _errors(record)
    yield from _hangs(record)
    yield from _samples(record)
    yield from _weights(record)


def _faults(record: Record, counts: Mapping[str, int]) -> Iterator[Finding]:
    """Say which planned faults have not happened."""
    for kind, count in record.given_up.items():
        text = (
            f"{count} of the planned {NAMES[kind]} did not happen: no process made a step in time, in {TRIES} attempts"
        )
        yield Finding(
            "faults", text, f"Pass a larger --minutes, or make the batch shorter than {OBEY_S:g} s", fails=False
        )
    missing = [kind for kind in KINDS if not counts[kind] and not record.given_up[kind]]
    if missing:
        text = f"none of: {', '.join(missing)}: there was no time for them"
        yield Finding("faults", text, "Pass a larger --minutes", fails=False)


def _state(record: Record, ignored: Sequence[str]) -> Iterator[Finding]:
    names = [name for name, count in record.replaced.items() if record.unrestored[name] == count]
    lost = sorted(set(names) - set(ignored))
    for name in lost:
        text = (
            f"self.{name} changes while training, and {record.unrestored[name]} of {record.replaced[name]} replacement worker(s) "
            "began with its value from setup()"
        )
        yield Finding("state", text, STATE_ADVICE.format(name=name))
    if not record.replacements and not lost:
        todo = "Pass a larger --minutes, so that a worker is killed and its replacement joins"
        yield Finding("state", "not compared, because no replacement worker has joined", todo, fails=False)
    elif not lost:
        yield Finding("state", f"{record.replacements} replacement worker(s) had all of it")


def _errors(record: Record) -> Iterator[Finding]:
    places = Counter(each["where"] for each in record.swallowed)
    for where, count in places.items():
        error = next(each["error"] for each in record.swallowed if each["where"] == where)
        text = f"{where or 'the operator'} caught a peer's failure {count} time(s), and continued: {error}"
        todo = "Catch the types of your own errors only, or raise the error again: the batch has no gradients of the other ranks"
        yield Finding("errors", text, todo)
    if not places:
        yield Finding("errors", "the operator passed on each failure of a peer")


def _hangs(record: Record) -> Iterator[Finding]:
    longest = f"the longest batch took {record.longest_s:.3g} s, and the limit is {record.hang_s:g} s"
    todo = (
        "Pass ElasticConfig(hang_timeout_s=...) of several times the longest batch, and a --hang-timeout above "
        f"{record.hang_s:g} to the drill"
    )
    if record.hangs:
        text = (
            f"a batch took longer than {record.hang_s:g} s, so raysgd ended its rank as if it hung: {record.hangs[0]}"
        )
        yield Finding("hang limit", text, f"{todo}; or make the batch shorter")
    elif record.longest_s > record.hang_s / 2:
        yield Finding("hang limit", longest, todo, fails=False)
    else:
        yield Finding("hang limit", longest)


def _samples(record: Record) -> Iterator[Finding]:
    what = _differing_data(record)
    if what:
        todo = "Register all data on every rank: raysgd divides it. setup() must not depend on world_rank or world_size"
        text = f"the training data of one worker {what} than that of another, so samples are used twice, or not at all"
        yield Finding("samples", text, todo)
    else:
        yield Finding("samples", f"the workers' training data was equal in {len(record.data)} comparison(s)")


def _differing_data(record: Record) -> str:
    """Return how the workers' data differ, "" if they do not. Samples may depend on the epoch, so only workers that were looked
    at together, and that are in the same epoch, are compared."""
    for look in record.data:
        for epoch in {each[0] for each in look}:
            lengths = {length for at, length, _ in look if at == epoch}
            if len(lengths) > 1:
                return f"has {' or '.join(map(str, sorted(lengths)))} samples"
            if len({content for at, _, content in look if at == epoch and content}) > 1:
                return "has other samples at the same index"
    return ""


def _weights(record: Record) -> Iterator[Finding]:
    if record.differing:
        follows = bool(record.swallowed)  # a rank that has continued alone had no part of the others' steps
        todo = "Change parameters only in the optimizer's step, alike on all ranks, and never depending on world_rank"
        todo = "Correct the errors above first" if follows else todo
        yield Finding("weights", record.differing, todo, fails=not follows)
    else:
        yield Finding("weights", f"equal on all ranks, after every {COMPARED_EVERY} steps")


# -- the drill ----------------------------------------------------------------------------------------


class Drill(Callback):
    """Owns one trainer under faults, and the record of what happened. The trainer calls it for each recovery."""

    def __init__(self, operator: Any, config: Any, *, workers: int, minutes: float, seed: int, hang_s: float) -> None:
        from raysgd.torch.drilled import drilled

        self._made = tempfile.TemporaryDirectory(prefix="raysgd-drill-", ignore_cleanup_errors=True)
        self._folder = Path(self._made.name)
        self._operator, self._config = drilled(operator, self._folder), config
        self._seconds, self._seed = minutes * 60, seed
        self.record = Record(hang_s=hang_s, workers=workers)
        self._changed: dict[int, set[str]] = {}
        self._striker: Striker | None = None
        self._in_train = False

    def on_recovery(self, recovery: Recovery) -> None:
        self.record.recoveries.append(recovery)
        if recovery.reason != "hang" or (self._striker is not None and self._striker.explains_hang()):
            return
        if self._in_train:
            self.record.hangs.append(recovery.detail)

    def run(self) -> Record:
        """Train without faults, and then with faults. Return what was seen."""
        from raysgd.torch import TorchTrainer

        record = self.record
        elastic = ElasticConfig(
            hang_timeout_s=record.hang_s,
            backoff_s=0.5,
            backoff_max_s=4.0,
            compare_weights=COMPARED_EVERY,
            on_divergence="raise",
        )
        with self._made:
            try:
                with TorchTrainer(
                    training_operator_cls=self._operator,
                    config=self._config,
                    num_workers=record.workers,
                    num_cpus_per_worker=CPUS,
                    use_gpu=False,
                    elastic=elastic,
                    callbacks=[self],
                ) as trainer:
                    self._train(trainer)
            except DivergenceError as error:
                record.differing = str(error).partition("\n")[0]
            except Exception as error:  # the user's code may raise anything
                record.error = described(error).partition("\n")[0]
            self._read_files()
        return record

    def _train(self, trainer: Any) -> None:
        began = time.monotonic()
        self._call(trainer, WARM_STEPS, 0)
        steps = self._steps_per_call(trainer)
        self._call(trainer, steps, 1)
        self._look(trainer, calm=True)
        if self.record.hangs:
            return
        until = max(began + self._seconds, time.monotonic() + self._seconds / 2)
        self._striker = striker = Striker(self._folder, self.record, seed=self._seed, until=until)
        striker.start()
        try:
            while not striker.over:
                striker.allowed.set()
                look_at = time.monotonic() + LOOK_EVERY_S
                try:
                    while time.monotonic() < look_at and not striker.over:  # an epoch can be very short
                        self._call(trainer, steps, RETRIES)
                finally:
                    striker.pause()
                self._look(trainer)
        finally:
            striker.end()
        trainer.resize(self.record.workers)
        self._call(trainer, steps, RETRIES)
        self._look(trainer)

    def _call(self, trainer: Any, steps: int | None, retries: int) -> None:
        """Train. A memory error that was injected ends the call only."""
        from raysgd.torch.drilled import INJECTED

        self._in_train = True
        try:
            trainer.train(steps, max_retries=retries)
        except Exception as error:
            if not any(INJECTED in str(each) for each in causes_of(error)):
                raise
        finally:
            self._in_train = False

    def _steps_per_call(self, trainer: Any) -> int | None:
        """Return for how many steps a call trains: to the end of the epoch, or for some seconds if that takes longer."""
        from raysgd.torch.drilled import report

        found = trainer.apply_all_operators(report)
        longest_s, batches = max(each["longest_s"] for each in found), max(each["batches"] for each in found)
        affordable = max(int(min(CALL_S, self._seconds / 6) / max(longest_s, 1e-3)), WARM_STEPS)
        return None if 0 <= batches <= affordable else affordable

    def _look(self, trainer: Any, *, calm: bool = False) -> None:
        """Compare the workers, between two calls."""
        from raysgd.torch.drilled import report

        record = self.record
        found = trainer.apply_all_operators(report)
        if calm:
            record.longest_s = max(each["longest_s"] for each in found)
        before = set().union(*self._changed.values())
        record.data.append([each["data"] for each in found])
        # A worker may have joined after the last batch of an epoch: the next look shows with which state it begins.
        begun = [each for each in found if each["begun"]]
        for each in begun:
            if self._changed and each["pid"] not in self._changed:
                record.replacements += 1
                record.replaced.update(before)
                record.unrestored.update(before & set(each["unrestored"]))
        self._changed = {each["pid"]: set(each["changed"]) for each in begun} or self._changed

    def _read_files(self) -> None:
        for path in sorted(self._folder.glob("*.swallowed")):
            for line in path.read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                where = found["where"].removeprefix(f"{Path.cwd()}{os.sep}")
                self.record.swallowed.append({"where": where, "error": found["error"][:LONGEST_ERROR]})


class FaultSchedule:
    """Decides which fault is next: each kind comes once before one comes again, in an order that the seed gives. A fault that
    no process got is the next one again, a few times."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        self._kinds, self._random = kinds, random.Random(seed)
        self._left: list[str] = []
        self._tries = 0

    @property
    def next(self) -> str:
        if not self._left:
            self._left = list(self._kinds)
            self._random.shuffle(self._left)
        return self._left[-1]

    def tried(self, struck: bool) -> bool:
        """Note whether a process got the next fault. Return whether the fault is given up."""
        self._tries += 1
        given_up = not struck and self._tries == TRIES
        if struck or given_up:
            self._left.pop()
            self._tries = 0
        return given_up


class Striker:
    """Owns a thread that injects faults while `allowed` is set. The seed gives their schedule."""

    def __init__(self, folder: Path, record: Record, *, seed: int, until: float) -> None:
        self._folder, self._record, self._until = folder, record, until
        self._schedule = FaultSchedule(KINDS, seed)
        self._random = random.Random(seed)  # how often it is used depends on the machine
        self._struck_at = 0.0  # when the newest fault was injected, as the clock of files shows it
        self._ended = threading.Event()
        self._striking = threading.Lock()
        self.allowed = threading.Event()
        self._unexplained = 0  # stopped processes and held locks whose hang raysgd has not yet noticed
        self._thread = threading.Thread(target=self._run, name="raysgd-drill", daemon=True)

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        """Return when no fault is being injected."""
        self.allowed.clear()
        with self._striking:
            return

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def explains_hang(self) -> bool:
        """Return whether a fault has made a rank hang, once for each fault."""
        explained = self._unexplained > 0
        self._unexplained -= explained
        return explained

    def _run(self) -> None:
        wait_s = LOOK_S
        while not self.over and not self._ended.wait(wait_s):
            wait_s = LOOK_S
            if not self.allowed.is_set():
                continue
            with self._striking:
                workers = self._active()
                # With all workers, so that a replacement has trained before the next fault.
                if self.allowed.is_set() and len(workers) >= self._record.workers:
                    self._strike(workers)
                    wait_s = 0.5 + self._random.random()

    def _strike(self, workers: Sequence[int]) -> None:
        """Inject the next fault."""
        kind, pid, at = self._schedule.next, self._random.choice(workers), time.monotonic()
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "notice": signal.SIGTERM}
        self._unexplained += kind in ("stop", "gil")
        struck = True
        try:
            if kind in signals:
                os.kill(pid, signals[kind])
            else:
                struck = self._ordered(pid, kind)
        except ProcessLookupError:
            struck = False
        self._record.given_up.update([kind] * self._schedule.tried(struck))
        if struck:
            self._struck_at = time.time()
            self._record.faults.append(Fault(at, kind, pid))
        else:
            self._unexplained -= kind in ("stop", "gil")

    def _ordered(self, pid: int, kind: str) -> bool:
        """Let a process do this to itself. Return False if it makes no step, and the order was withdrawn."""
        path = self._folder / f"{pid}.order"
        draft = path.with_suffix(".draft")
        draft.write_text(f"{kind} {GIL_PART * self._record.hang_s}", encoding="utf-8")
        draft.rename(path)
        until = time.monotonic() + OBEY_S
        while path.exists() and time.monotonic() < until and self.allowed.is_set() and not self._ended.wait(0.01):
            pass
        try:
            path.unlink()
        except FileNotFoundError:  # the process has taken it
            return True
        return False

    def _active(self) -> list[int]:
        """Return the workers that have made a step just now, and after the newest fault: one that it has stopped has not."""
        found = []
        for path in self._folder.glob("*.worker"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime > max(time.time() - RECENT_S, self._struck_at):
                    os.kill(int(path.stem), 0)
                    found.append(int(path.stem))
        return sorted(found)


def checked_config(text: str | None) -> Any:
    """Return the config that a JSON text, or the file in `@FILE`, contains."""
    if text is None:
        return None
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config must be a JSON object, or @FILE, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--config must be a JSON object such as '{{\"lr\": 0.1}}', got {text!r}")
    return value

"""What outlives the script of a trainer with a name: the record, from which the next one continues.
Driver."""

from __future__ import annotations

import logging
import pickle
import re
import sys
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

from raysgd.callbacks.history import History
from raysgd.config import ORPHAN_S, at_least
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError, counted, shown
from raysgd.training.place import Made, Place
from raysgd.training.settings import OperatorReplicaFactory
from raysgd.workers.keeper import Tenure
from raysgd.workers.serialization import dumps

logger = logging.getLogger("raysgd")

MOST_SHOWN = 80  # characters of a setting in an error
STATE, ROW = "state", "row {}"  # the parts of the record


class NamedRun:
    """Owns what the driver of a trainer with a name commits, and what is left of the one before it:
    `before`, {} if there is nothing, and the `rows` of the history.

    A call of `train`, `validate` or `test`, or one that changes the state, returns when what it
    returns is in the record, at its `place`. A script that is started again continues with the call
    that was running.
    """

    def __init__(self, tenure: Tenure, factory: OperatorReplicaFactory, place: Place) -> None:
        self.tenure, self._settings, self._place = tenure, dict(_settings(factory, tenure.orphan_s)), place
        self.before: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._stored = 0  # rows in the record
        self.attached = False
        self.evaluated: dict[str, Any] = {}  # before the body that was running
        self._warned = False

    def start(self, engine: Engine) -> None:
        """Take over the workers of the last script, or start workers if there are none."""
        record = self.tenure.record
        if record.get(STATE):
            self.before = pickle.loads(record[STATE])
            self._check_equal(self.before["settings"])
            self.rows = [pickle.loads(record[ROW.format(n)]) for n in range(self.before["rows"])]
            self._stored = len(self.rows)
        found = {each: self.before.get(each) for each in ("trained", "reached")}
        try:
            self.attached = engine.attach(**found, recoveries=self.before.get("recoveries", ()))
        except BaseException:
            self.leave()
            raise
        if not self.attached:
            if self.before:
                logger.warning(
                    "the workers that the last script with the trainer %r left behind have ended. Starting new ones",
                    self.tenure.name,
                )
            self.before, self.rows, self._stored = {}, [], 0
            self.tenure.begin_again()  # before there are workers that would not fit the record
            engine.start()
            return
        self.evaluated, made = self.before["evaluated"], list(self.before["made"])
        if engine.progress.loads > self.before["changes"]:  # it has ended before it could note a change
            made.append(Made("", None))
        loop, done = self.before["place"]
        self._place.resume(loop, done, made)
        logger.warning(
            "attached to the %s of the trainer %r, in epoch %d after batch %d: training continues there, with the code of this "
            "script",
            counted(engine.world_size, "worker"),
            self.tenure.name,
            engine.progress.epoch,
            engine.progress.batches,
        )

    def _check_equal(self, had: Mapping[str, str]) -> None:
        """Raise ConfigError if what must be the same in two scripts is not."""
        this = self._settings
        names = [name for name in {**had, **this} if had.get(name) != this.get(name)]
        if names:
            now, last = (
                ", ".join(f"{name}={(of.get(name) or '(not set)')[:MOST_SHOWN]}" for name in names)
                for of in (this, had)
            )
            raise ConfigError(
                f"this script has {now}, but the workers of the trainer {self.tenure.name!r}, which wait for it, were started with "
                f"{last}. Use that, choose another name, or end them with `raysgd end {self.tenure.name}`"
            )

    def leave(self) -> None:
        """Say what becomes of the workers, because the script has ended by an error."""
        if not self.tenure.superseded:
            logger.warning(
                "the workers of the trainer %r keep its state, their CPUs and their GPUs for %g s (until %s). Run the script again to "
                "continue, or end them with `raysgd end %s`",
                *(self.tenure.name, self.tenure.orphan_s),
                time.strftime("%H:%M:%S", time.localtime(time.time() + self.tenure.orphan_s)),
                self.tenure.name,
            )

    def warn_of_plain_loop(self, epochs: int) -> None:
        """Warn, once, of a call of `train` that no loop over `epochs()` makes."""
        if self.attached and epochs and not self._warned:
            self._warned = True
            logger.warning(
                "this script calls train() outside of a loop over trainer.epochs(n), so it repeats epochs: the last script had come to "
                "epoch %d. Write `for epoch in trainer.epochs(n):`, which continues with the epoch that was running",
                epochs,
            )

    # -- the loop -------------------------------------------------------------------------------------

    def begin_body(self, evaluated: dict[str, Any], engine: Engine, history: History, wants: list[bool]) -> None:
        """Note that the body of a loop begins."""
        self.evaluated = evaluated
        if not (self.attached and self._place.is_resumed):  # otherwise the next script would begin with the last one
            self.commit(engine, history, wants)

    def commit(self, engine: Engine, history: History, wants: list[bool]) -> None:
        """Store the state, the rows of the history that are new, and which callbacks want the loop
        to end. Raise SupersededError if another script has taken over. Without this, no script
        takes training over."""
        first = max(self._stored - 1, 0)  # callbacks can have added an error to the newest one
        rows = {ROW.format(first + n): dumps(row) for n, row in enumerate(history[first:])}
        self._stored = len(history)
        place = (self._place.loop, self._place.done)
        body = {"place": place, "evaluated": self.evaluated, "made": self._place.made, "wants": wants}
        engines = {"trained": engine.trained, "recoveries": engine.recoveries, "reached": engine.reached}
        state = {"settings": self._settings, "rows": self._stored, "changes": engine.changes, **engines, **body}
        self.tenure.commit({**rows, STATE: dumps(state)})


def checked_name(name: Any, orphan_s: Any) -> tuple[str, float] | None:
    """Check the trainer's name and how long its workers wait, None without a name."""
    if name is None and orphan_s == ORPHAN_S:
        return None
    if name is None:
        raise ConfigError(f"orphan_s={orphan_s!r} has no effect without name=: pass one, or leave orphan_s out")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"name must be a text of letters, digits, '.', '-' and '_', got {name!r}")
    at_least("orphan_s", orphan_s, 1)
    return name, float(orphan_s)


def _settings(factory: OperatorReplicaFactory, orphan_s: float) -> Iterator[tuple[str, str]]:
    """Yield what must be the same in the next script, as names and texts."""
    yield "training_operator_cls", factory.operator_cls.__name__
    yield from _texts("orphan_s", orphan_s)
    yield from _texts("config", factory.config)
    for each in fields(factory.settings):
        if each.name not in ("rows", "use_tqdm"):
            yield from _texts(each.name, getattr(factory.settings, each.name))


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a setting, without what differs in each process."""
    if isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type)):
        parts = (
            value if isinstance(value, Mapping) else {each.name: getattr(value, each.name) for each in fields(value)}
        )
        for part, each in parts.items():
            yield from _texts(f"{name}[{part!r}]" if parts is value else f"{name}.{part}", each)
    else:
        ordered = sorted(value, key=repr) if isinstance(value, Set) else value
        yield name, re.sub(r" at 0x\w+", "", shown(ordered, 1 << 16))


def new_tenure(name: str, orphan_s: float) -> Tenure:
    """Become the driver of this trainer, also after another object of this process: a notebook's
    cell is run again."""
    for engine in list(Engine.living):
        if getattr(engine.group, "trainer", None) == name:
            engine.stop(force=True, leave=True)
            engine.end_trainer(force=True)  # its callbacks, and its hold on the folder of checkpoints
    return Tenure(name, orphan_s)


def ended_by_itself() -> bool:
    """Whether the script that ends now has come to its end, and not to an error. A notebook never
    does: its process is restarted."""
    return last_error() is None and "ipykernel" not in sys.modules


def last_error() -> BaseException | None:
    """The error that has ended the script, or the newest one that ended a notebook's cell."""
    return getattr(sys, "last_value", None)

"""What outlives the script of a trainer with a name: the record, from which the next one continues.
Driver."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

from raysgd.callbacks.history import History
from raysgd.config import ORPHAN_S, at_least
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError, counted, shown
from raysgd.training.replica_base import OperatorReplicaFactory
from raysgd.workers.keeper import Tenure
from raysgd.workers.serialization import dumps

logger = logging.getLogger("raysgd")

MOST_SHOWN = 80  # characters of a setting in an error


class NamedRun:
    """Owns what the driver of a trainer with a name commits, and what is left of the one before it.

    A call of `train`, `validate` or `test` returns when what it measured is in the record. In the
    body of a loop over `epochs()`, a script that is started again gets what had returned there, in
    order, and continues with the call that was running. Bodies that make other calls, because the
    code was changed, get nothing from it.
    """

    def __init__(self, tenure: Tenure, factory: OperatorReplicaFactory) -> None:
        self.tenure, self._settings = tenure, dict(_settings(factory, tenure.orphan_s))
        self.before: dict[str, Any] = {}  # what the last script has committed
        self.attached = False
        self._body: list[tuple[str, Any, Any]] = []  # the calls of this body that have returned
        self._replayed: list[tuple[str, Any, Any]] = []  # those of the last script that this one has not made yet
        self._place: tuple[int, int] = (0, 0)  # the loop, and its epochs that are done
        self._counts: tuple[int, int] = (0, 0)
        self._warned = False

    def start(self, engine: Engine) -> None:
        """Take over the workers of the last script, or start workers if there are none."""
        name, before = self.tenure.name, pickle.loads(self.tenure.record) if self.tenure.record else {}
        if before:
            self._check_equal(before["settings"])
        found = {each: before.get(each) for each in ("trained", "reached")}
        try:
            self.attached = engine.attach(**found, recoveries=before.get("recoveries", ()))
        except BaseException:
            self.leave()
            raise
        if not self.attached:
            if before:
                logger.warning(
                    "the workers that the last script with the trainer %r has left have ended: starting new ones", name
                )
            self.tenure.commit(b"")  # before there are workers that would not fit it
            engine.start()
            return
        self.before, self._place, self._counts = before, before["place"], before["counts"]
        logger.warning(
            "attached to the %s of the trainer %r, in epoch %d after batch %d: training continues there, with the code of this "
            "script",
            counted(engine.world_size, "worker"),
            name,
            engine.progress.epoch,
            engine.progress.batches,
        )

    def _check_equal(self, had: Mapping[str, str]) -> None:
        names = [name for name in {**had, **self._settings} if had.get(name) != self._settings.get(name)]
        if names:
            this, last = (
                ", ".join(f"{name}={(of.get(name) or '(not set)')[:MOST_SHOWN]}" for name in names)
                for of in (self._settings, had)
            )
            raise ConfigError(
                f"this script has {this}, and the workers of the trainer {self.tenure.name!r}, which wait for it, were started with "
                f"{last}: use that, choose another name, or end them with `raysgd end {self.tenure.name}`"
            )

    def leave(self) -> None:
        """Say what becomes of the workers, because the script has ended by an error."""
        if not self.tenure.superseded:
            logger.warning(
                "the workers of the trainer %r keep its state for %g s: run the script again to continue, or end them with "
                "`raysgd end %s`",
                *(self.tenure.name, self.tenure.orphan_s, self.tenure.name),
            )

    def warn_of_plain_loop(self, epochs: int) -> None:
        """Warn, once, of a call of `train` that no loop over `epochs()` makes."""
        if self.attached and epochs and not self._warned:
            self._warned = True
            logger.warning(
                "this script calls train() outside of a loop over trainer.epochs(n), and so repeats epochs: the last script had "
                "come to epoch %d. Write `for epoch in trainer.epochs(n):`, which continues with the one that was running",
                epochs,
            )

    # -- the loop -------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """Return the loop that was running, and how many of its epochs were done."""
        return self._place

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many validations and tests there were before the body that was running."""
        return self._counts

    def begin_body(self, loop: int, done: int, counts: tuple[int, int]) -> int:
        """Note that the body of a loop begins. Return how many of its calls have returned in the
        script before."""
        again = self.attached and (loop, done) == self.before.get("place")
        self._replayed = list(self.before.get("body", ())) if again else []
        self._place, self._counts, self._body = (loop, done), counts, []
        return len(self._replayed)

    def recorded(self, kind: str) -> tuple[Any, Any] | None:
        """Return what this call had measured in the last script, if that had returned."""
        if not self._replayed:
            return None
        (was, result, each), *self._replayed = self._replayed
        if was != kind:
            logger.warning("this script calls %s() where the last one called %s(): the call is made", kind, was)
            self._replayed = []
            return None
        self._body.append((was, result, each))
        return result, each

    def begin(self, place: tuple[int, int], engine: Engine, history: History) -> None:
        """Store that training begins, or where it has resumed. Without this, no script takes it
        over."""
        self._place = place
        self._commit(engine, history)

    def commit(self, kind: str, result: Any, each: Any, engine: Engine, history: History) -> None:
        """Store what a call has measured, before it returns. Raise SupersededError if another
        script has taken over."""
        self._body.append((kind, result, each))
        self._commit(engine, history)

    def _commit(self, engine: Engine, history: History) -> None:
        record = {
            "settings": self._settings,
            "trained": engine.trained,
            "reached": engine.progress,
            "recoveries": engine.recoveries,
            "rows": history.rows,
            "place": self._place,
            "counts": self._counts,
            "body": self._body,
        }
        self.tenure.commit(dumps(record))


def checked_name(name: Any, orphan_s: Any, *, sharded: bool) -> tuple[str, float] | None:
    """Return the trainer's name and how long its workers wait, None without a name."""
    if name is None and orphan_s == ORPHAN_S:
        return None
    if name is None:
        raise ConfigError(f"orphan_s={orphan_s!r} has no effect without name=: pass one, or leave orphan_s out")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"name must be a text of letters, digits, '.', '-' and '_', got {name!r}")
    if sharded:
        raise ConfigError("name= is not possible with a sharded model: leave it out, or use parallel='ddp'")
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


def ended_by_itself() -> bool:
    """Return whether the script that ends now has come to its end, and not to an error. A notebook
    never does: its process is restarted."""
    return getattr(sys, "last_value", None) is None and "ipykernel" not in sys.modules

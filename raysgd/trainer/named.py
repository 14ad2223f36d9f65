"""What outlives the script of a trainer with a name: the record, from which the next one continues.
Driver."""

from __future__ import annotations

import atexit
import logging
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

from raysgd.config import ORPHAN_S, at_least
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError, counted, shown
from raysgd.replica.settings import OperatorReplicaFactory
from raysgd.trainer.call_runner import CallRunner
from raysgd.trainer.script_place import RAISED, Made
from raysgd.workers.cluster.keeper import Tenure
from raysgd.workers.serialization import dumps

logger = logging.getLogger("raysgd")

MOST_SHOWN = 80  # characters of a setting in an error
STATE, ROW = "state", "row {}"  # the parts of the record


class NamedCalls(CallRunner):
    """Makes the calls of a trainer with a name. Owns what this driver commits of them, and ends the
    trainer with the script, or leaves its workers to the next one.

    A call of `train`, `validate` or `test`, or one that changes the state, returns when what it
    returns is in the record, at its `place`. A script that is started again continues with the call
    that was running.
    """

    def __init__(self, factory: OperatorReplicaFactory, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._factory = factory
        self._stored = 0  # rows in the record
        self._evaluated: dict[str, Any] = {}  # before the body that was running
        self._warned = False

    def take_lease(self, name: str, orphan_s: float) -> Tenure:
        """Become the driver, also after another object of this process: a notebook's cell is run
        again."""
        for engine in list(Engine.living):
            tenure = getattr(engine.group, "tenure", None)
            if tenure is not None and tenure.name == name:
                tenure.leaves = True
                engine.end_trainer(force=True)  # and its callbacks, and its hold on the folder of checkpoints
        self.tenure = Tenure(name, orphan_s)
        return self.tenure

    # -- begin and end --------------------------------------------------------------------------------

    def _start(self, engine: Engine) -> None:
        """Take over the workers of the last script, or start workers if there are none."""
        self._engine, tenure, record = engine, self.tenure, self.tenure.record
        self._settings = dict(_settings(self._factory, tenure.orphan_s))
        before = pickle.loads(record[STATE]) if record.get(STATE) else {}
        if before:
            self._check_equal(before["settings"])
        progress = {each: before.get(each) for each in ("trained", "reached")}
        tenure.leaves = False
        try:
            self.attached = engine.attach(**progress, recoveries=before.get("recoveries", ()))
            if self.attached:
                self._continue(before)
        except BaseException:
            self._leave()
            raise
        if not self.attached:
            if before:
                logger.warning(
                    "the workers that the last script with the trainer %r left behind have ended. Starting new ones",
                    tenure.name,
                )
            tenure.begin_again()  # before there are workers that would not fit the record
            engine.start()

    def _continue(self, before: Mapping[str, Any]) -> None:
        """Continue where the last script was."""
        engine, (loop, done), calls = self._engine, before["place"], list(before["made"])
        if engine.calls.progress.loads > before["changes"]:  # it has ended before it could note a change
            calls.append(Made("", None))
        self.place.resume(loop, done, calls)
        self._evaluated, self._stored = before["evaluated"], before["rows"]
        self.evaluated.update(self._evaluated)
        logger.warning(
            "attached to the %s of the trainer %r, in epoch %d after batch %d: training continues there, with the code of this "
            "script",
            counted(engine.world_size, "worker"),
            self.tenure.name,
            engine.calls.progress.epoch,
            engine.calls.progress.batches,
        )
        self.resume([pickle.loads(self.tenure.record[ROW.format(n)]) for n in range(self._stored)], before["wants"])

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

    def begun(self, stop: Callable[..., None]) -> None:
        self._stop = stop
        atexit.register(self._at_exit)
        if not self.attached:
            self.commit()

    def _at_exit(self) -> None:
        """End the trainer with the script. A notebook never comes to its end: its process is
        restarted."""
        if self._engine.calls.active:
            self.note_exit(last_error())
            if "ipykernel" in sys.modules and not self.tenure.leaves:
                self._leave()
            self._stop(force=True)

    def note_exit(self, error: BaseException | None) -> None:
        """Let the workers wait for the next script if it would take them over, and an error has
        ended this one. A call with this error is in the record if `finally` has made calls after
        it."""
        super().note_exit(error)
        if self._forget(error) and not self.tenure.superseded:
            try:
                self.commit()
            except Exception as failed:
                logger.warning("the record still has this error, so the next script gets it again: %s", failed)
        if self.tenure.record and self._engine.calls.active and not isinstance(error, SystemExit | None):
            self._leave()

    def _leave(self) -> None:
        self.tenure.leaves = True
        if not self.tenure.superseded:
            logger.warning(
                "the workers of the trainer %r keep its state, their CPUs and their GPUs for %g s (until %s). Run the script again to "
                "continue, or end them with `raysgd end %s`",
                *(self.tenure.name, self.tenure.orphan_s),
                time.strftime("%H:%M:%S", time.localtime(time.time() + self.tenure.orphan_s)),
                self.tenure.name,
            )

    def end(self) -> None:
        atexit.unregister(self._at_exit)
        super().end()

    def _forget(self, error: BaseException | None) -> bool:
        """Forget the newest call with an error, if this is the error, which has ended the script,
        and the evaluations after it: the next script makes them again. Return whether there were
        any after it."""
        (known, record), calls = self.place.raised, self.place.made
        at = next((number for number, each in enumerate(calls) if each is record), None)
        while error is not None and error is not known:
            error = error.__cause__ or error.__context__
        if error is None or at is None or any(_trains(each) for each in calls[at + 1 :]):
            return False
        after = len(calls) - at - 1
        del calls[at:]
        return after > 0

    # -- the loop -------------------------------------------------------------------------------------

    def warn_of_plain_loop(self) -> None:
        super().warn_of_plain_loop()
        epochs = self._engine.calls.progress.epoch
        if self.attached and epochs and not self._warned:
            self._warned = True
            logger.warning(
                "this script calls train() outside of a loop over trainer.epochs(n), so it repeats epochs: the last script had come to "
                "epoch %d. Write `for epoch in trainer.epochs(n):`, which continues with the epoch that was running",
                epochs,
            )

    def begin_body(self, loop: int, done: int) -> int:
        rows, self._evaluated = super().begin_body(loop, done), dict(self.evaluated)
        if not (self.attached and self.place.is_resumed):  # otherwise the next script would begin with the last one
            self.commit()
        return rows

    def _store(self, *, caught: bool = False) -> None:
        """Store an error that was `caught`: a script that is started again would take the next call
        for the one with the error."""
        if not caught or (self.place.made and self.place.made[-1].call.startswith(RAISED)):
            self._forget(last_error())
            self.commit()

    def commit(self) -> None:
        """Store the state, the rows of the history that are new, and which callbacks want the loop
        to end. Raise SupersededError if another script has taken over. Without this, no script
        takes training over."""
        engine, place, first = self._engine, self.place, max(self._stored - 1, 0)
        # Callbacks can have added an error to the newest one.
        rows = {ROW.format(first + n): dumps(row) for n, row in enumerate(self.history[first:])}
        self._stored = len(self.history)
        at = (place.loop, place.done)
        body = {"place": at, "evaluated": self._evaluated, "made": place.made, "wants": self.wants}
        engines = {"trained": engine.calls.trained, "recoveries": engine.recoveries, "reached": engine.calls.reached}
        state = {"settings": self._settings, "rows": self._stored, "changes": engine.calls.changes, **engines, **body}
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


def _trains(record: Made) -> bool:
    """Whether a call has changed the state."""
    return not record.call.startswith(RAISED) and (record.each is None or record.call.startswith("train("))


def last_error() -> BaseException | None:
    """The error that has ended the script, or the newest one that ended a notebook's cell."""
    return getattr(sys, "last_value", None)

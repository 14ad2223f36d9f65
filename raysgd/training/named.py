"""What outlives the script of a trainer with a name: the record, from which the next one continues.
Driver."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Mapping
from typing import Any

from raysgd.callbacks.history import History
from raysgd.config import WorkerResources, at_least
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError, shown
from raysgd.training.replica_base import OperatorReplicaFactory
from raysgd.workers.cluster import ensure_cluster
from raysgd.workers.keeper import Tenure

logger = logging.getLogger("raysgd")


class NamedRun:
    """Owns what the driver of a trainer with a name commits, and what is left of the one before it.

    A call of `train`, `validate` or `test` returns when what it measured is in the record. In the
    body of a loop over `epochs()`, a script that is started again gets what had returned there, in
    order, and continues with the call that was running. Bodies that make other calls, because the
    code was changed, get nothing from it.

    settings  what must be the same in both scripts
    """

    @classmethod
    def of(cls, named: tuple[str, float], factory: OperatorReplicaFactory, resources: WorkerResources) -> NamedRun:
        """Take the lease of a trainer. Raise TrainerBusyError if another script has it."""
        ensure_cluster(resources)
        own = {"operator": factory.operator_cls.__name__, "config": dict(factory.config)}
        return cls(Tenure(*named), own | {"num_workers": factory.settings.num_workers})

    def __init__(self, tenure: Tenure, settings: Mapping[str, Any]) -> None:
        self.tenure, self._settings = tenure, dict(settings)
        self.before: dict[str, Any] = pickle.loads(tenure.record) if tenure.record else {}
        self.attached = False
        self._body: list[tuple[str, Any, Any]] = []  # the calls of this body that have returned
        self._replayed: list[tuple[str, Any, Any]] = []  # those of the last script that this one has not made yet
        self._place: tuple[int, int] = (0, 0)  # the loop, and its epochs that are done
        self._counts: tuple[int, int] = (0, 0)

    def start(self, engine: Engine) -> None:
        """Take over the workers of the last script, or start workers if there are none."""
        if self.tenure.term > 1:
            self._check_equal()
            before = self.before
            self.attached = engine.attach(
                trained=before.get("trained"),
                reached=before.get("reached"),
                recoveries=before.get("recoveries", ()),
            )
        if not self.attached:
            self.before = {}
            self.tenure.commit(b"")  # before there are workers that would not fit it
            engine.start()
            return
        self._place, self._counts = self.before["place"], self.before["counts"]
        logger.warning(
            "attached to %d workers of the trainer %r, in epoch %d after %d batches: a loop over trainer.epochs() continues "
            "there, and any other loop begins again",
            engine.world_size,
            self.tenure.name,
            engine.progress.epoch,
            engine.progress.step,
        )

    def _check_equal(self) -> None:
        for name, value in self._settings.items():
            had = self.before.get("settings", self._settings).get(name)
            if had != value:
                raise ConfigError(
                    f"the trainer {self.tenure.name!r} has workers that were started with {name}={shown(had)}, and this script has "
                    f"{name}={shown(value)}: use the same, choose another name, or end them with `raysgd end {self.tenure.name}`"
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
        """Store that training begins, or where it has resumed. Without this, nobody takes it
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
        self.tenure.commit(pickle.dumps(record))


def checked_name(name: Any, orphan_s: Any, *, sharded: bool) -> tuple[str, float] | None:
    """Return the trainer's name and how long its workers wait, None without a name."""
    if name is None:
        return None
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"name must be a text of letters, digits, '.', '-' and '_', got {name!r}")
    if sharded:
        raise ConfigError("name= is not possible with a sharded model: nobody has tried whether its shards survive")
    at_least("orphan_s", orphan_s, 1)
    return name, float(orphan_s)


def ended_by_itself() -> bool:
    """Return whether the script that ends now has come to its end, and not to an error. A notebook
    never does: its process is restarted."""
    return getattr(sys, "last_value", None) is None and "ipykernel" not in sys.modules

"""What outlives the script of a function trainer with a name: its runs, in the order in which the
script makes them. Driver."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from raysgd.callbacks.history import History
from raysgd.engine.engine import Engine
from raysgd.errors import counted
from raysgd.train.run import Record, RunLeft
from raysgd.training.named import Named, texts
from raysgd.workers.keeper import Tenure
from raysgd.workers.serialization import dumps

# More parts of the record: one for each run, and the newest checkpoint, if it is not in storage.
RUN, CHECKPOINT = "run {}", "checkpoint"


class Naming(NamedTuple):
    """The name under which workers outlive their script, for how many seconds, where its runs are
    stored, and how many `earlier` ones there are, or for `fit()` reports of the run that is
    restored."""

    name: str
    orphan_s: float
    where: str
    earlier: int


class NamedFunctions(Named, Record):
    """Owns what the driver of a function trainer commits.

    What a rank has reported is acknowledged when its round is in the record. So the next script
    continues a run as after a worker failure: the function runs again from the last commit or the
    newest checkpoint. It gets the rounds that this one has not got, and the one with which it was
    busy. A run that had returned returns the same again.
    """

    outlives = True

    def __init__(
        self, tenure: Tenure, engine: Engine, settings: Iterable[tuple[str, str]], history: History | None, earlier: int
    ) -> None:
        super().__init__(tenure, settings)
        self._engine, self._history, self.earlier = engine, history, earlier
        # With what must be the same in the next script, and the number of rows before.
        self._runs: list[tuple[dict[str, str], RunLeft, int]] = []
        self._begun = 0  # runs, in this script
        self._this: dict[str, str] = {}
        self._rows_before = 0

    def take_over(self) -> None:
        """Take over the workers of the last script, or start workers. The runs that it had begun
        continue in any case."""
        self.start(self._engine)
        self._runs = [pickle.loads(self.tenure.record[RUN.format(n)]) for n in range(self.before.get("runs", 0))]
        if self._runs:
            self.earlier = self.before["earlier"]
        if self.before and self._history is not None:
            self._history.on_resume(self.rows)
        self._store({})

    def _continue(self, engine: Engine) -> str:
        return f"after {counted(len(self.rows), 'round')} of reports: the function runs again from its last state"

    def next_run(self, name: str, config: Mapping[str, Any] | None) -> tuple[RunLeft | None, bytes]:
        """Return what the last script has left of the run that comes next, and its newest
        checkpoint, if that is not in storage. `rows` are those of this run. Raise ConfigError if
        that script ran another function there, or with another config."""
        self._this = {"function": name, **dict(texts("config", config or {}))}
        rows = [] if self._history is None else self._history.rows
        self.rows, self._rows_before = [], len(rows)
        if self._begun >= len(self._runs):
            return None, b""
        (had, left, self._rows_before), *later = self._runs[self._begun :]
        self.check_equal(self._this, had)
        self.rows = rows[self._rows_before : later[0][2] if later else None]
        return left, self.tenure.record.get(CHECKPOINT, b"") if self._begun == len(self._runs) - 1 else b""

    def begin(self) -> int:
        """Begin this run. Return its number."""
        self._begun += 1
        return self._begun

    def check(self) -> None:
        self.tenure.check()

    def keep(self, left: RunLeft, checkpoint: bytes | None = None, *, shown: bool = False) -> None:
        number = self._begun - 1
        self._runs[number:] = [(self._this, left, self._rows_before), *self._runs[number + 1 :]]
        parts = {RUN.format(number): dumps(self._runs[number])}
        self._store(parts if checkpoint is None else {**parts, CHECKPOINT: checkpoint}, shown=shown)

    def _store(self, parts: Mapping[str, bytes], *, shown: bool = False) -> None:
        state = {"runs": len(self._runs), "earlier": self.earlier}
        self._commit(self._engine, self._history if shown else None, state, parts)

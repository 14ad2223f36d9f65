"""The guard of one call: when it asks, whom it ends, and for whom it waits."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.engine.hanging import HangGuard
from raysgd.progress import Progress

LIMIT_S = 10.0


class Paper:
    """A crew whose members have not moved for longer than the limit; `silent` says for how long each has said nothing."""

    def __init__(self, **silent: float) -> None:
        self.clock = time.monotonic
        at = self.clock() - LIMIT_S - 1
        self.members = {name: SimpleNamespace(moved_at=at, rank=0, node="", progress=Progress()) for name in silent}
        self.group: Any = SimpleNamespace(silent_for=silent.__getitem__, tell=lambda worker, message: True)
        self.rounds = itertools.count(1)
        self.ended: list[str] = []

    def take_answers(self, kind: type) -> list[Any]:
        return []

    def kill(self, worker: str, reason: str, why: str) -> None:
        self.ended.append(worker)


@pytest.mark.parametrize(
    ("silent", "ended"),
    [
        ({"a": 11.0, "b": 11.2}, ["a", "b"]),
        ({"a": 2.6, "b": 11.0}, ["b"]),
        ({"a": 2.6}, []),
        ({"a": 5.1}, ["a"]),
    ],
    ids=["both stopped", "one waits, and was late", "a short silence at the limit", "half of the limit"],
)
def test_who_is_ended_at_the_limit(silent: dict[str, float], ended: list[str]) -> None:
    crew, deadlocks = Paper(**silent), list[str]()
    guard = HangGuard(crew, LIMIT_S, deadlocks.append)  # type: ignore[arg-type]
    for _ in range(2):  # asks, then judges
        guard.tick(list(silent))
    assert (sorted(crew.ended), deadlocks) == (ended, [])

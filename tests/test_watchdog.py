"""The watchdog of one call asks for stacks, kills the ranks that block the others, and waits for late answers."""

from typing import Any

import pytest

from raysgd.core.messages import StackReport
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.events import Event, MessageReceived

LIMIT_S = 10.0


class Silent:
    """A group whose workers never answer. `silent` says for how long each has sent nothing."""

    def __init__(self, silent: dict[str, float]) -> None:
        self.silent_for = silent.__getitem__
        self.launch = lambda count: list(silent)
        self.killed: list[str] = []

    def send(self, worker: str, message: Any) -> bool:
        return True

    def kill(self, worker: str) -> None:
        self.killed.append(worker)


@pytest.mark.parametrize(
    ("silent", "killed"),
    [
        ({"a": 11.0, "b": 11.2}, ["a", "b"]),
        ({"a": 2.6, "b": 11.0}, ["b"]),
        ({"a": 2.6}, []),
        ({"a": 5.1}, ["a"]),
    ],
    ids=["both are stopped", "one is stopped", "a short silence", "silent for half of the limit"],
)
def test_ranks_that_block_the_others_are_killed_at_the_limit(silent: dict[str, float], killed: list[str]) -> None:
    now = [1000.0]
    group: Any = Silent(silent)
    table = WorkerTable(group, clock=lambda: now[0])
    table.launch(len(silent))
    now[0] += LIMIT_S + 1
    watchdog = Watchdog(table, list(silent), LIMIT_S)
    for _ in range(2):  # the first asks for stacks, the second one decides
        watchdog.tick(list(silent))
    assert sorted(group.killed) == killed


def test_answers_to_another_request_are_not_taken() -> None:
    """A replacement whose set-up takes too long is asked for its stack while the watchdog waits for stacks."""
    now, events = [1000.0], list[Event]()
    group: Any = Silent({"a": 0.0, "b": 0.0})
    group.poll = lambda timeout: [events.pop(0) for _ in list(events)]
    table = WorkerTable(group, clock=lambda: now[0])
    table.launch(2)
    mine, other = table.request_stacks(["a"]), table.request_stacks(["b"])
    events += [
        MessageReceived("a", StackReport(mine, ("train",))),
        MessageReceived("b", StackReport(other, ("set up",))),
    ]
    table.pump(0.0)
    assert table.take_answers(StackReport, other) == [("b", StackReport(other, ("set up",)))]
    assert table.take_answers(StackReport, mine) == [("a", StackReport(mine, ("train",)))]
    assert table.take_answers(StackReport, mine) == []

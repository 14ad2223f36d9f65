"""When preempted workers leave: the one whose time is up, and not those that still wait for their replacements."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.engine.membership import Membership


class Table(dict[str, Any]):
    now, during = 0.0, nullcontext

    def members(self) -> list[str]:
        return list(self)

    def clock(self) -> float:
        return self.now


class World:
    """Two members, each on a node of its own. Replacements are starting, and none is ready."""

    def __init__(self, **machines_end_at: float) -> None:
        self.ends, self.changes = machines_end_at, list[tuple[list[str], list[str]]]()
        at = SimpleNamespace(epoch=1, batches=1, step=1)
        self.table = Table(
            {name: SimpleNamespace(worker=name, notice=False, node=name, rank=0, progress=at) for name in "ab"}
        )
        self.table.group = SimpleNamespace(elastic=True, draining=self._draining)  # type: ignore[attr-defined]
        nothing: Any = SimpleNamespace()
        generation: Any = SimpleNamespace(take_seconds=dict)
        self.replacements: Any = SimpleNamespace(
            ready=0,
            starting=2,
            look=lambda missing: None,
            look_at_once=lambda: None,
            dismiss_preempted=lambda draining: None,
            gathered=lambda missing: False,
            take=lambda count: [],
        )
        table: Any = self.table
        log: Any = SimpleNamespace(record=lambda change: None)
        self.membership: Any = Membership(
            table,
            generation,
            self.replacements,
            log,
            target=2,
            elastic=ElasticConfig(),
            limits=nothing,
            in_place=True,
            notice=None,
        )
        self.membership._replace = self._replaced

    def _draining(self) -> dict[str, float]:
        return {node: max(end - self.table.now, 0.0) for node, end in self.ends.items()}

    def _replaced(self, stay: list[str], leavers: list[str], joining: list[str], call: int) -> bool:
        self.changes.append((stay, leavers))
        for worker in leavers:
            del self.table[worker]
        return True

    def stops_at(self, *times: float) -> float | None:
        """Return the first of these times at which the call is stopped, and make the change."""
        for self.table.now in times:
            if self.membership.wants_boundary():
                self.membership.change(1)
                return self.table.now
        return None


def test_the_worker_whose_time_is_up_leaves_alone() -> None:
    world = World(a=12.0, b=300.0)
    assert world.stops_at(0.0, 1.0, 2.5) == 2.5
    assert world.changes == [(["b"], ["a"])]
    assert world.stops_at(3.0, 200.0, 289.0, 290.5) == 290.5
    assert world.changes[1:] == [([], ["b"])]


def test_all_leave_when_their_replacements_are_ready() -> None:
    world = World(a=12.0, b=300.0)
    assert world.stops_at(0.0) is None
    world.replacements.ready = 2
    assert world.stops_at(0.5) == 0.5
    assert world.changes == [([], ["a", "b"])]


def test_a_second_notice_that_leaves_less_time_counts() -> None:
    world = World(a=300.0)
    assert world.stops_at(0.0, 5.0) is None
    world.table["a"].notice = True  # SIGTERM: its machine will be stopped in about 30 s
    assert world.stops_at(6.0, 20.0, 26.5) == 26.5
    world = World()
    world.table["a"].notice = True
    assert world.stops_at(0.0) is None
    world.ends["a"] = 13.0
    assert world.stops_at(1.0, 2.0, 3.5) == 3.5

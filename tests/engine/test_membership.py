"""When preempted workers leave: the one whose time is up, and not those that still wait for their replacements."""

from types import SimpleNamespace
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.core.channel.messages import PreemptionNotice
from raysgd.engine.membership import Membership
from raysgd.workers.events import MessageReceived, WorkerStarted
from tests.engine.fake_group import FakeGroup


class Machines(FakeGroup):
    """Its workers have a machine each, with the worker's name. Some of these will be stopped."""

    def __init__(self, ends: dict[str, float]) -> None:
        super().__init__(names="ab")
        self.now, self.ends = 0.0, ends

    def draining(self) -> dict[str, float | None]:
        return {node: max(end - self.now, 0.0) for node, end in self.ends.items()}


class World:
    """Two members, each on a machine of its own. Replacements are starting, and none is ready."""

    def __init__(self, *, notice: Any = None, call: Any = None, **machines_end_at: float) -> None:
        self.group = Machines(machines_end_at)
        self.table = self.group.table(lambda: self.group.now)
        self.table.enter_group(self.table.launch(2))
        self.group.events += [WorkerStarted(name, name, 1, "") for name in "ab"]
        self.table.pump(0)
        generation: Any = SimpleNamespace(call=call, in_place=True)
        self.replacements: Any = SimpleNamespace(
            ready=0,
            starting=2,
            look=lambda missing: None,
            look_at_once=lambda: None,
            dismiss_preempted=lambda draining: None,
            should_join=lambda missing: False,
            keep=lambda missing: None,
        )
        self.membership = Membership(
            self.table, generation, self.replacements, target=2, elastic=ElasticConfig(), notice=notice
        )

    def gets_sigterm(self, worker: str) -> None:
        self.group.events.append(MessageReceived(worker, PreemptionNotice()))
        self.table.pump(0)

    def stops_at(self, *times: float) -> float | None:
        """Return the first of these times at which the call is stopped, and let those leave that are to."""
        for self.group.now in times:
            self.membership.look_for_leavers()
            if self.membership.wants_boundary():
                seen = self.membership.plan()
                assert (seen.kind, seen.reason) == ("paused", "preemption")
                for worker in seen.leaving:
                    self.table.dismiss(worker)
                return self.group.now
        return None


def test_the_worker_whose_time_is_up_leaves_alone() -> None:
    world = World(a=12.0, b=300.0)
    assert world.stops_at(0.0, 1.0, 2.5) == 2.5
    assert world.group.dismissed == ["a"]
    assert world.stops_at(3.0, 200.0, 289.0, 290.5) == 290.5
    assert world.group.dismissed == ["a", "b"]


def test_all_leave_when_their_replacements_are_ready() -> None:
    world = World(a=12.0, b=300.0)
    assert world.stops_at(0.0) is None
    world.replacements.ready = 2
    assert world.stops_at(0.5) == 0.5
    assert world.group.dismissed == ["a", "b"]


def test_a_second_notice_that_leaves_less_time_counts() -> None:
    world = World(a=300.0)
    assert world.stops_at(0.0, 5.0) is None
    world.gets_sigterm("a")  # its machine will be stopped in about 30 s
    assert world.stops_at(6.0, 20.0, 26.5) == 26.5
    world = World()
    world.gets_sigterm("a")
    assert world.stops_at(0.0) is None
    world.group.ends["a"] = 13.0
    assert world.stops_at(1.0, 2.0, 3.5) == 3.5

"""Inject the faults of a plan: into workers when they reach a point of their code, and into the driver while it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from greenlet import GreenletExit

from raysgd.core.decisions.policy import LEAVE_BEFORE_S
from raysgd.core.outcomes import DataLoaderFailure
from tests.simulation.checker import Checker
from tests.simulation.group import CallDidNotEnd, Node, SimGroup, Worker
from tests.simulation.network import DRIVER
from tests.simulation.plan import HARMLESS, ON_DRIVER, ON_SCRIPT, Fault, Plan
from tests.simulation.replica import GpuError, UserError
from tests.simulation.world import World

__all__ = ["Cancelled", "Schedule"]

# SIGTERM comes this long before a machine is stopped (where nothing else is known, the library assumes 30 s).
GRACE_S = 31.0
# Within this many seconds of a call's beginning, or after the last fault, the longest chain of waits of the table in
# docs/guarantees.md must have ended: to notice a hang, release the ranks, agree, start new processes, set them up, meet.
SETTLE_S = 60.0
LASTING = ("stop", "slow", "cut", "partition", "split", "lose")
# A connection that takes nothing for longer means a driver that does nothing, which is a fault of its own.
LOSES_S = 4.0
# A fault can be the cause of what the driver notices this long after it: some it notices only in the next call.
CAUSE_S = 120.0


class Cancelled(Exception):
    """Another thread cancelled the call."""


class Schedule:
    """Injects each fault of a plan once. Knows what the driver is doing (`phase`), when the last fault was over, and when
    the last one that can break a generation was."""

    group: SimGroup
    cancel: Callable[[BaseException], None]
    recoveries: Callable[[], int]

    def __init__(self, world: World, plan: Plan, checker: Checker) -> None:
        self._world, self._plan, self._checker = world, plan, checker
        self._waiting: dict[str, list[tuple[Fault, list[int]]]] = {}
        for fault in plan.faults:
            self._waiting.setdefault(fault.at, []).append((fault, [fault.count]))
        self._phases = ["start"]
        self._fresh: set[str] = set()  # machines that replace others
        self._broken: set[tuple[str, str]] = set()  # GPUs, by their node and number
        self._callback: UserError | None = None
        self.call_began = self.over_at = world.now
        self.harmful_until = 0.0
        self.work_s = 0.0
        self.interrupted_at = 0.0
        self.first_call = 0
        self.struck: Counter[tuple[str, str]] = Counter()
        self.slowest_s = 0.0
        self.drivers: Any = None  # of a trainer with a name

    @property
    def now(self) -> float:
        return self._world.now

    @property
    def phase(self) -> str:
        return self._phases[-1]

    @property
    def calm(self) -> bool:
        """Return whether nothing that has happened so far can be the cause of a failure now."""
        return self._world.now > self.harmful_until

    @property
    def ended(self) -> bool:
        """Return whether an error or the user may have ended a call, in a batch whose metrics are then missing."""
        return any(kind in ("raise", "callback", "ctrl-c", "cancel") for kind, _ in self.struck)

    @property
    def announced(self) -> bool:
        """Return whether the end of a machine was announced."""
        return any(kind in ("notice", "drain") for kind, _ in self.struck)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Return a context in which the driver is in this phase."""
        phases = self._phases
        phases.append(phase)
        try:
            yield
        finally:
            phases.pop()

    def turn(self, phases: list[str]) -> None:
        """Note that another driver runs now, which is in these phases."""
        self._phases = phases

    def watch(self, engine: Any) -> None:
        """Let faults reach an engine that was made with `during`."""
        self._checker.schedule, self._checker.engine = self, engine
        self.cancel, self.recoveries = engine.cancel, lambda: len(engine.recoveries)

    def begin_call(self, work_s: float = 0.0) -> None:
        """Note that a call of the script begins, in which training takes about `work_s`."""
        self.call_began, self.work_s, self.first_call = self._world.now, work_s, self.group.last_call

    # -- points ---------------------------------------------------------------------------------------

    def strike(self, worker: Worker, point: str) -> None:
        """Inject what is due, now that a worker has reached a point."""
        if self._broken and point in ("forward", "setup"):
            self._use_gpu(worker)
        for fault in self._due(point) if point in self._waiting else ():
            self._hit(worker, fault)

    def _use_gpu(self, worker: Worker) -> None:
        """Raise an error if the GPU of a worker is broken."""
        if (worker.node.name, worker.gpu) in self._broken:
            self.disturbed(0.0, harmful=True)
            raise GpuError(f"GPU {worker.gpu} of {worker.node.name} is still broken")

    def driver_waits(self) -> None:
        """Inject what is due, now that the driver waits for an event. Raise an error if it has waited for too long."""
        if self.drivers is not None and self.drivers.closed:
            raise GreenletExit
        waited_s = self._world.now - max(self.call_began, self.over_at)
        self.slowest_s = max(self.slowest_s, waited_s - self.work_s)
        if waited_s > SETTLE_S + self.work_s:
            raise CallDidNotEnd(f"a call had not ended {waited_s:.0f} s after the last fault, in phase '{self.phase}'")
        at = f"in {self.phase}"
        for fault in self._due(at) if at in self._waiting else ():
            alive = [each for each in self.group.workers.values() if each.alive]
            if fault.kind in ON_DRIVER or fault.kind in ON_SCRIPT:
                self._hit_driver(fault)
            elif alive:
                self._hit(alive[fault.pick % len(alive)], fault)

    def driver_sends(self, what: str) -> None:
        """Inject what is due, now that the driver sends something."""
        for fault in self._due(what) if what in self._waiting else ():
            self._hit_script(fault)

    def on_progress(self, info: Any) -> None:
        """Be the user's callback, which may raise an error."""
        error, self._callback = self._callback, None
        if error is not None:
            self._checker.thrown(error, None, self.recoveries())
            raise error

    def _due(self, point: str) -> list[Fault]:
        due = []
        for entry in list(self._waiting[point]):
            entry[1][0] -= 1
            if entry[1][0] <= 0:
                self._waiting[point].remove(entry)
                due.append(entry[0])
        return due

    # -- faults ---------------------------------------------------------------------------------------

    def _count(self, fault: Fault, victim: str, lasts_s: float = 0.0) -> None:
        self.struck[fault.kind, self.phase] += 1
        self._world.note("FAULT %s of %s, %s (in %s)", fault.kind, victim, fault.at, self.phase)
        self.disturbed(lasts_s, harmful=fault.kind not in HARMLESS)

    def disturbed(self, lasts_s: float, *, harmful: bool) -> None:
        self.over_at = max(self.over_at, self._world.now + lasts_s)
        if harmful:
            self.harmful_until = max(self.harmful_until, self.over_at + CAUSE_S)

    def _hit_script(self, fault: Fault) -> None:
        """End or stop the driver's process, which other processes notice, and start another script."""
        drivers, driver = self.drivers, self.drivers.newest
        if driver is None:
            return
        self._count(fault, "the script", fault.seconds)
        if fault.kind == "die":
            driver.die()
            drivers.start_after(fault.seconds)
        elif fault.kind == "abandon":
            driver.die()
            drivers.ended = True
        elif fault.kind == "rival":
            drivers.start_after(fault.seconds / 10)
        else:
            self.disturbed(fault.seconds, harmful=False)
            driver.stop()
            self._world.at(fault.seconds, driver.resume)
            if fault.pick % 2:
                drivers.start_after(fault.pick / 10)
        drivers.park()

    def _hit_driver(self, fault: Fault) -> None:
        if fault.kind in ON_SCRIPT:
            self._hit_script(fault)
            return
        lasts_s = fault.seconds if fault.kind == "pause" else 0.0
        self._count(fault, "the driver", lasts_s)
        if fault.kind == "ctrl-c":
            self.interrupted_at = self._world.now
            raise KeyboardInterrupt
        if fault.kind == "cancel":
            self.cancel(Cancelled("planned"))
        elif fault.kind == "callback":
            self._callback = UserError(f"planned in a callback, in {self.phase}")
        elif fault.kind == "pause":
            self.group.wait(fault.seconds, lambda: False)
        else:
            self._world.jump(fault.seconds)

    def _hit(self, worker: Worker, fault: Fault) -> None:
        if fault.kind in ON_SCRIPT:
            self._hit_script(fault)
            return
        if fault.kind == "raise":
            self._count(fault, worker.name)
            error = UserError(f"planned at '{fault.at}' on {worker.name}")
            ends_call = fault.at not in ("hook", "setup", "closing") and worker.client.call > self.first_call
            ends_call = ends_call and not worker.client.control.interrupted  # it is then a part of a peer's failure
            self._checker.thrown(error, worker if ends_call else None, self.recoveries())
            raise error
        if fault.kind == "gpu":
            self._count(fault, worker.name)
            if fault.pick % 2:
                self._broken.add((worker.node.name, worker.gpu))
                self._replace(worker.node)
            raise GpuError(f"planned at '{fault.at}' on {worker.name}")
        if fault.kind == "loader":
            self._count(fault, worker.name)
            raise DataLoaderFailure("planned")
        others = [each for each in self.group.workers.values() if each.alive and each is not worker]
        start = fault.pick % len(others) if others else 0
        for victim in [*[*others[start:], *others[:start]][: fault.others], worker]:
            self._count(fault, victim.name, fault.seconds if fault.kind in LASTING else 0.0)
            getattr(self, f"_{fault.kind}")(victim, fault.seconds)

    def _kill(self, victim: Worker, seconds: float) -> None:
        victim.die("SIGKILL")

    def _stop(self, victim: Worker, seconds: float) -> None:
        victim.stop()
        self._world.at(seconds, victim.resume)

    def _freeze(self, victim: Worker, seconds: float) -> None:
        victim.stop()

    def _slow(self, victim: Worker, seconds: float) -> None:
        victim.slow = 10.0
        self._world.at(seconds, lambda: setattr(victim, "slow", 1.0))

    def _skew(self, victim: Worker, seconds: float) -> None:
        victim.ahead_s += seconds

    def _lose(self, victim: Worker, seconds: float) -> None:
        victim.loses = True
        self._world.at(min(seconds, LOSES_S), lambda: setattr(victim, "loses", False))

    def _disconnect(self, victim: Worker, seconds: float) -> None:
        victim.lose_connection("its control connection was reset", "worker death", dies_in_s=min(seconds, 2.0))

    def _reset(self, victim: Worker, seconds: float) -> None:
        if victim.backend.group is not None:
            victim.backend.group.leave(victim)

    def _notice(self, victim: Worker, seconds: float) -> None:
        victim.client.notice()
        self._goes(victim, GRACE_S, lambda: victim.die("its machine was stopped"))

    def _node(self, victim: Worker, seconds: float) -> None:
        node = victim.node
        if node.alive:
            node.alive = False
            self._replace(node)
            for each in list(node.workers):
                each.die("its node vanished", silently=True)

    def _cut(self, victim: Worker, seconds: float) -> None:
        self.group.block(victim.node, "", seconds)

    def _partition(self, victim: Worker, seconds: float) -> None:
        self.group.block(victim.node, DRIVER, seconds)

    def _split(self, victim: Worker, seconds: float) -> None:
        others = [node.name for node in self.group.nodes if node is not victim.node and node.alive]
        if others:
            self.group.network.block(victim.node.name, others[0], seconds)

    def _add(self, victim: Worker, seconds: float) -> None:
        self.group.nodes.append(Node(f"added{len(self.group.nodes)}", victim.node.slots))

    def _drain(self, victim: Worker, seconds: float) -> None:
        node = victim.node
        if node.draining:
            return
        after_s = {0.05: 8.0, 1.0: 14.0}.get(seconds, 40.0)  # with the last two, replacements come first
        node.draining, node.removed_at = True, self._world.now + after_s
        self._replace(node)
        self._world.at(after_s, lambda: setattr(node, "alive", False))
        for each in list(node.workers):
            self._goes(each, after_s, partial(each.die, "its node was removed"))

    def _goes(self, worker: Worker, after_s: float, end: Callable[[], None]) -> None:
        """End a worker that was announced to leave. By then the engine must have moved its work, if it could."""
        announced_at = self._world.now
        if worker.announced_at is None:
            worker.announced_at, worker.leave_by = announced_at, announced_at + after_s - LEAVE_BEFORE_S

        def leave() -> None:
            if worker.alive and not worker.given_up:
                self._checker.leaves_too_late(worker, announced_at)
                self.disturbed(0.0, harmful=True)
            end()

        self._world.at(after_s, leave)

    def _replace(self, node: Node) -> None:
        """Add a new machine for one that leaves, after a while."""
        name = f"{node.name}+"
        while name in self._fresh:  # one that is drained can vanish, too
            name += "+"
        self._fresh.add(name)
        fresh = Node(name, node.slots)
        after_s = self._world.between(0.5, 4.0)
        self.over_at = max(self.over_at, self._world.now + after_s)
        self._world.at(after_s, lambda: self.group.nodes.append(fresh))

"""Run the script of a trainer with a name, whose driver ends, is stopped, or is started twice.

Each driver is a process, whose code runs in a greenlet of its own until it waits. A process that ends runs nothing any
more, not even a `finally`. A script that is started again begins with the line that the record names, as one whose earlier
calls get their recorded results."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from raysgd.core.decisions.lease import LEASE_S, Lease
from raysgd.engine.engine import Engine
from raysgd.errors import ResourceError, SupersededError, WorkerStartError
from tests.simulation.checker import Violation
from tests.simulation.faults import Cancelled
from tests.simulation.group import SimGroup
from tests.simulation.plan import Plan
from tests.simulation.replica import UserError
from tests.simulation.scenario import Result, Script
from tests.simulation.world import Process, World

__all__ = ["run_named"]

logger = logging.getLogger("raysgd")

RIVAL_TRIES = 5
TAKEOVER_S = 6.0  # for a step, a set-up or a validation to end, the new set-up, and to form a generation


class Driver(Process):
    """One process of the script."""

    def __init__(self, world: World, drivers: Drivers, group: SimGroup) -> None:
        super().__init__(world)
        self.drivers, self.group, self.phases = drivers, group, ["start"]
        self.over = False  # it has ended by itself
        self.began_at, self.resumed_at, self.silent_from = world.now, 0.0, 0.0
        self.deadline, self._enough = 0.0, lambda: True
        self.script: NamedScript | None = None
        self.greenlet = greenlet(self._main, parent=world.hub)
        group.driver = self

    def ready(self) -> bool:
        return self.running and (self.world.now >= self.deadline or self._enough())

    @property
    def running(self) -> bool:
        return self.alive and not self.over and self.stopped_at is None

    def wait(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let others run for so many seconds, or until there is enough."""
        self.deadline, self._enough = self.world.now + seconds, enough
        if not enough():
            self.pause()

    def pause(self) -> None:
        """Let others run."""
        if self.drivers.closed:
            raise GreenletExit
        self.world.hub.switch()
        if self.drivers.closed:
            raise GreenletExit

    def call(self, do: Callable[[], Any]) -> Any:
        """Make a call of an actor."""
        schedule = self.drivers.schedule
        self.wait(self.world.between(0.001, 0.01), lambda: False)
        answer = do()
        schedule.driver_sends("keeper")
        self.wait(self.world.between(0.001, 0.01), lambda: False)
        return answer

    def die(self, why: str = "") -> None:
        super().die()
        self.world.note("DRIVER of term %d ends", self.group.term)
        self._gone()

    def stop(self) -> None:
        super().stop()
        self.silent_from = self.world.now
        self.world.note("DRIVER of term %d is stopped", self.group.term)
        self.group.driver_stopped()

    def resume(self) -> None:
        if self.alive and not self.over:
            self.world.note("DRIVER of term %d continues", self.group.term)
            self.resumed_at = self.world.now
            super().resume()

    def _gone(self) -> None:
        self.over = True
        self.group.driver_ended()
        if self.script is not None:
            Engine.living.discard(self.script.engine)
            if self.script.backend._rendezvous is not None:
                self.script.backend._rendezvous.close()

    def _main(self) -> None:
        try:
            self.script = NamedScript(self)
            self.script.run()
        except SupersededError as error:
            if self.group.keeper.term == self.group.term:
                raise Violation(f"the newest driver was superseded: {error}") from error
            self.world.note("DRIVER of term %d: %s", self.group.term, error)
        except NotGranted:
            self.world.note("DRIVER gives up")
        except (KeyboardInterrupt, Cancelled, UserError) as error:  # in a takeover: the script ends with it
            if isinstance(error, UserError):
                self.drivers.checker.raised(error)
            self.world.note("DRIVER of term %d ends with %r", self.group.term, error)
            self.drivers.start_after(1.0)
        finally:
            if not self.drivers.closed:
                self._gone()


class NotGranted(Exception):
    """Another script has the trainer."""


class Drivers:
    """Owns the processes of the script, and lets them run in turn."""

    def __init__(self, plan: Plan, world: World, first: Script) -> None:
        self.plan, self.world, self.first = plan, world, first
        self.checker, self.schedule = first.checker, first.schedule
        self.schedule.drivers = self
        self.closed, self._coming = False, 0
        self.keeper = Lease()
        first.group.keeper = self.keeper
        self.all: list[Driver] = []
        self.saved: Any = None
        self.ended = False  # whether a script has come to its end, or is never started again
        self._start(first.group)

    @property
    def newest(self) -> Driver | None:
        """Return the driver that runs now, or else the newest one that can run."""
        now = [each for each in self.all if each.greenlet is getcurrent()]
        return next((each for each in [*now, *reversed(self.all)] if each.running), None)

    def start_after(self, seconds: float) -> None:
        self._coming += 1
        self.world.at(seconds, self._start_next)

    def _start_next(self) -> None:
        self._coming -= 1
        if not self.ended:
            group = SimGroup(self.world, self.plan, self.checker, self.schedule, self.all[-1].group)
            self._start(group)

    def _start(self, group: SimGroup) -> None:
        self.all.append(Driver(self.world, self, group))

    def park(self) -> None:
        """Let others run, if the driver that runs has ended or was stopped. (A worker may run: then this is for later.)"""
        for each in self.all:
            if each.greenlet is getcurrent() and not each.running:
                each.pause()

    def run(self) -> None:
        while True:
            ready = [each for each in self.all if each.ready()]
            for driver in ready:
                if driver.ready():
                    self._turn(driver)
            if ready:
                continue
            left = [each for each in self.all if each.alive and not each.over]
            if not left and not self._coming:
                break
            deadlines = [each.deadline for each in left if each.running]
            seconds = min(deadlines) - self.world.now if deadlines else 1000.0
            self.world.run(max(seconds, 0.0), lambda: any(each.ready() for each in self.all))
            self.checker.raise_found()
        self._check_nothing_is_left()

    def _turn(self, driver: Driver) -> None:
        script = driver.script
        self.schedule.turn(driver.phases)
        Engine.living.clear()  # those of other processes
        if script is not None:
            self.schedule.group = driver.group
            self.schedule.watch(script.engine)
        driver.greenlet.switch()

    def _check_nothing_is_left(self) -> None:
        group = self.all[-1].group
        alive = lambda: [worker.name for worker in group.workers.values() if worker.alive]  # noqa: E731
        stopped = lambda: [w.name for w in group.workers.values() if w.alive and w.stopped_at is not None]  # noqa: E731
        wait_s = max(self.schedule.over_at - self.world.now, 0.0) + self.plan.orphan_s + 45.0
        self.world.run(wait_s, lambda: not alive())
        self.checker.raise_found()
        left = [name for name in alive() if name not in stopped()]
        if left:
            raise Violation(f"orphans are left: {left}")

    def close(self) -> None:
        self.closed = True
        for each in self.all:
            if each.script is not None:
                Engine.living.discard(each.script.engine)
            if each.greenlet and not each.greenlet.dead:
                with contextlib.suppress(BaseException):  # what the code of a process that has ended does about its end
                    each.greenlet.throw(GreenletExit)


class NamedScript(Script):
    """The script of one driver: it takes the lease, takes over or starts the workers, and commits after each line."""

    def __init__(self, driver: Driver) -> None:
        drivers, first = driver.drivers, driver.drivers.first
        self.driver, self.drivers, self.plan, self.world = driver, drivers, drivers.plan, drivers.world
        self.checker, self.schedule, self.group = first.checker, first.schedule, driver.group
        record = self._take_lease()
        self._line, self._trained, self._recoveries, target, self._reached = record or (
            0,
            None,
            [],
            self.plan.ranks,
            None,
        )
        self.engine = self._new_engine(target)
        driver.script = self
        self.schedule.group = self.group
        self.schedule.watch(self.engine)

    @property
    def _saved(self) -> Any:
        return self.drivers.saved

    @_saved.setter
    def _saved(self, saved: Any) -> None:
        self.drivers.saved = saved

    def _take_lease(self) -> Any:
        driver, keeper, tries = self.driver, self.drivers.keeper, 0
        while True:
            sent = self.world.clock()
            grant = driver.call(lambda: self._granted(keeper.take(self.world.now)))
            if grant.term:
                break
            tries += 1
            others = [each for each in self.drivers.all if each is not driver and each.running]
            if tries > RIVAL_TRIES and others:
                raise NotGranted
            driver.wait(min(grant.wait_s, 1.0), lambda: False)
            if self.drivers.ended:
                raise NotGranted
        self.group.renewed_at = sent
        self.group.renew_often()
        return pickle.loads(grant.record[""]) if grant.record.get("") else None

    def _granted(self, grant: Any) -> Any:
        if grant.term:
            self.group.term = grant.term
            self.world.note("DRIVER of term %d begins", grant.term)
            self.checker.granted(self.driver, self.drivers.all)
        return grant

    def run(self) -> None:
        self.schedule.begin_call()
        if self.group.term > 1:
            self._take_over()
            self.checker.ended()
        if self.group.term == 1 or not self.engine.world_size:
            try:
                self._start()
            except (ResourceError, WorkerStartError, UserError, KeyboardInterrupt, Cancelled):
                if not self.schedule.struck:
                    raise
                self._end()
                return
            self._commit()
        lines = self.plan.script
        while self._line < len(lines):
            self._until_done(*lines[self._line].split())
            self._line += 1
            self._commit()
        self._end()

    def _take_over(self) -> None:
        began = self.world.now
        if not self.engine.attach(trained=self._trained, reached=self._reached, recoveries=self._recoveries):
            self._begin_again()
        elif len(self.engine.recoveries) != len(self._recoveries) + 1:
            raise Violation(f"after a takeover, the recoveries are {self.engine.recoveries}")
        else:
            self.checker.taken_over([self.group.workers[name] for name in self.engine._table.members()])
        machines_at = max((1000.0 + when for when, _ in self.plan.later), default=0.0)
        # Workers that have heard an earlier driver, which returned and was stopped again, are not orphans before.
        heard_until = max(each.silent_from for each in self.drivers.all) + LEASE_S
        took_s = self.world.now - max(began, self.driver.resumed_at, machines_at, heard_until)
        if self.schedule.calm and took_s > TAKEOVER_S + 2 * (not self.plan.in_place):  # for new processes
            raise Violation(f"a takeover took {took_s:.1f} s")

    def _begin_again(self) -> None:
        holders = self.checker.holders(self.group)
        if holders and self.schedule.calm:
            raise Violation(f"training begins again, and {holders} have its state")
        self.checker.begins_again(self.group)
        self._line = 0
        if not self.driver.call(
            lambda: self.drivers.keeper.begin_again(self.group.term, self.group.launched, self.world.now)
        ):
            raise SupersededError("another script has taken over")

    def _commit(self) -> None:
        place = (
            self._line,
            self.engine.calls.trained,
            self.engine.recoveries,
            self.engine.target,
            self.engine.calls.reached,
        )
        record, keeper, term = pickle.dumps(place), self.drivers.keeper, self.group.term
        if not self.driver.call(lambda: keeper.renew(term, {"": record}, self.world.now)):
            raise SupersededError("another script has committed")

    def _end(self) -> None:
        self.schedule.begin_call()
        self._shut_down()
        self.drivers.ended = True

    def _shut_down(self) -> None:
        try:
            super()._shut_down()
        except Violation as error:
            if self.group.superseded:
                raise SupersededError("another script has the workers") from error
            raise

    def _run_job(self, job: Any) -> Any:
        parts = super()._run_job(job)
        self.group.renew()  # a call does not return to a script whose workers another one has
        if self.group.term != self.drivers.keeper.term:  # it was stopped after the keeper had answered
            raise SupersededError("what it has is what was committed, and its next call raises this")
        return parts


def run_named(plan: Plan, *, tracing: bool = False) -> Result:
    """Run a plan of a trainer with a name."""
    world = World(plan.seed, tracing=tracing)
    first = Script(plan, world)
    drivers, result = Drivers(plan, world, first), Result(plan, trace=world.trace)
    try:
        drivers.run()
    except (Exception, KeyboardInterrupt, Violation) as error:
        result.error = error
    finally:
        Engine.living.discard(first.engine)
        drivers.close()
        world.close()
    checker, schedule = first.checker, first.schedule
    result.steps, result.redone = checker.applied_steps, checker.redone
    result.struck, result.slowest_s = schedule.struck, schedule.slowest_s
    result.recoveries = drivers.all[-1].script.engine.recoveries if drivers.all[-1].script else []
    return result

"""Break what keeps a training alive without its driver, in named ways. The simulation must detect each of them.

detected.json has the number of seeds that each one needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.decisions.lease import Grant, Lease
from raysgd.engine import generation, takeover
from raysgd.engine.engine import Engine
from raysgd.engine.generation import Generation
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.orphan import DriverContact, Left, NamedHost
from tests.simulation.group import SimGroup
from tests.simulation.seeds import simulate

__all__ = ["MUTANTS", "seeds_needed"]

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[breaks.__name__] = breaks
    return breaks


def seeds_needed(name: str, most: int, *, step: int = 10) -> int | None:
    """Return within how many seeds the simulation detects a mutant, None if it does not."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        for first in range(0, most, step):
            if simulate(first, min(step, most - first), kind="named").failed:
                return first + step
    return None


# -- one driver ---------------------------------------------------------------------------------------


@mutant
def grant_a_lease_that_holds(patch: Patch) -> None:
    original = Lease.take

    def take(self: Lease, now: float) -> Grant:
        self.until = -math.inf
        return original(self, now)

    patch.setattr(Lease, "take", take)


@mutant
def let_a_script_wait_although_the_last_one_has_ended(patch: Patch) -> None:
    patch.setattr(Lease, "witness", lambda self, term, now: None)


@mutant
def renew_a_term_that_is_over(patch: Patch) -> None:
    patch.setattr(Lease, "renew", lambda self, term, record, now: True)


@mutant
def act_without_renewing_after_a_stop(patch: Patch) -> None:
    def _check(self: SimGroup) -> None:
        if self.superseded:
            self.renew()
        self.checker.acts(self)

    patch.setattr(SimGroup, "_check", _check)


@mutant
def forget_the_workers(patch: Patch) -> None:
    patch.setattr(Lease, "enlist", lambda self, term, worker, now: term == self.term)


@mutant
def count_generations_from_one_again(patch: Patch) -> None:
    patch.setattr(generation, "GENERATIONS", 0)


@mutant
def keep_no_record(patch: Patch) -> None:
    original = Lease.renew
    patch.setattr(Lease, "renew", lambda self, term, record, now: original(self, term, None, now))


# -- orphans ------------------------------------------------------------------------------------------


@mutant
def wait_for_a_driver_for_ever(patch: Patch) -> None:
    original = DriverContact._give_up
    patch.setattr(DriverContact, "_give_up", lambda self: None if self._orphan_s else original(self))


@mutant
def end_with_the_driver(patch: Patch) -> None:
    original = DriverContact.look

    def look(self: DriverContact, now: float, *, holds_state: bool) -> None:
        original(self, now, holds_state=False)

    patch.setattr(DriverContact, "look", look)


@mutant
def never_notice_a_silent_driver(patch: Patch) -> None:
    original = DriverContact.look

    def look(self: DriverContact, now: float, *, holds_state: bool) -> None:
        if self.has_ended:
            original(self, now, holds_state=holds_state)

    patch.setattr(DriverContact, "look", look)


@mutant
def wait_for_peers_that_have_stopped(patch: Patch) -> None:
    """Orphans stay in their process group for good."""
    original = DriverContact.look

    def look(self: DriverContact, now: float, *, holds_state: bool) -> None:
        self._lingers = False
        original(self, now, holds_state=holds_state)
        self._lingers = False

    patch.setattr(DriverContact, "look", look)


# -- the takeover -------------------------------------------------------------------------------------


@mutant
def begin_again_with_new_workers(patch: Patch) -> None:
    def gather(table: WorkerTable, generation: Generation, workers: Sequence[str]) -> list[Left]:
        for worker in workers:
            table.dismiss(worker)
        return []

    patch.setattr(takeover, "gather", gather)


@mutant
def take_a_state_of_any_generation(patch: Patch) -> None:
    original = NamedHost._attach

    def attach(self: NamedHost, factory: Any) -> Left | None:
        found = original(self, factory)
        return None if found is None else replace(found, rank_info=replace(found.rank_info, generation=1))

    patch.setattr(NamedHost, "_attach", attach)


@mutant
def forget_which_call_was_running(patch: Patch) -> None:
    original = Engine.attach

    def attach(self: Engine, *, trained: int, **given: Any) -> bool:
        return original(self, trained=trained + 1, **given)

    patch.setattr(Engine, "attach", attach)


@mutant
def forget_what_was_measured_before(patch: Patch) -> None:
    patch.setattr(takeover, "results_left", lambda left, call: [])


@mutant
def keep_the_record_of_a_training_that_is_lost(patch: Patch) -> None:
    patch.setattr(Lease, "begin_again", lambda self, term, own, now: self.renew(term, None, now))


@mutant
def take_no_snapshot_in_a_takeover(patch: Patch) -> None:
    original = Engine.attach

    def attach(self: Engine, **given: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(takeover, "newest_state", lambda found: None)
            return original(self, **given)

    patch.setattr(Engine, "attach", attach)


@mutant
def forget_earlier_recoveries(patch: Patch) -> None:
    original = Engine.attach
    patch.setattr(Engine, "attach", lambda self, *, recoveries, **given: original(self, recoveries=[], **given))

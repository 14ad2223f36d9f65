"""One try to stand the next generation: leave, agree on the state, meet, set up.

Every step can lose members, also in the middle of another recovery. Then the try is over (False), and whoever
calls looks at who is left and decides again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.config import Limits
from raysgd.core.messages import Interrupt
from raysgd.engine.crew import Crew
from raysgd.engine.failure import raise_user_error, unfinished_story
from raysgd.errors import WorkerStartError
from raysgd.outcomes import Failed, Lost, Ok, Outcome
from raysgd.progress import most_advanced
from raysgd.protocols import Backend
from raysgd.rendezvous import assign_seats

__all__ = ["Former"]


class Former:
    """Owns the generation's number. Uses the crew; knows nothing of why a new generation is needed."""

    def __init__(self, crew: Crew, backend: Backend, limits: Limits) -> None:
        self._crew, self._backend, self._limits = crew, backend, limits
        self.generation = 0
        self._has_formed = False

    def interrupt(self, workers: Sequence[str]) -> None:
        """The generation that stands is over: whoever waits for a peer in it is freed."""
        for worker in workers:
            self._crew.group.tell(worker, Interrupt(self.generation))

    def form(self, workers: Sequence[str], *, hook: Any, factory: Any, state: Any = None) -> bool:
        """Stands a generation of exactly these workers, in this order of ranks. Those that are set up here take
        `state`, where there is one."""
        members = [self._crew.members[worker] for worker in workers]
        for member in self._crew.members.values():
            if member.seated and member.worker not in workers:
                member.seated = False
        if not self._leave([m.worker for m in members if m.seated]):
            return False
        for rank, member in enumerate(members):
            if not member.seated:
                member.rank = rank  # the one it is to have: an error in its set-up names it
        fresh = [m.worker for m in members if not m.built]
        if not self._agree_on_state([m.worker for m in members if m.built]):
            return False
        if fresh and not self._prepare(fresh, hook):
            return False
        if not self._meet(workers):
            return False
        if fresh and not self._build(fresh, factory):
            return False
        if (
            fresh
            and state is not None
            and not self._all_ok(self._ask(fresh, "load", {"data": state}, self._limits.setup_s))
        ):
            return False
        for rank, member in enumerate(members):
            member.rank, member.seated, member.built, member.holds_state = rank, True, True, True
        self._has_formed = True
        return True

    def give(self, workers: Sequence[str], state: Any) -> bool:
        """Newcomers take a snapshot. An error in the user's own `load_state_dict` is raised; a loss is False."""
        outcomes = self._ask(workers, "load", {"data": state}, self._limits.setup_s)
        for worker, outcome in outcomes.items():
            self._crew.members[worker].holds_state = isinstance(outcome, Ok)
        return self._all_ok(outcomes)

    def _leave(self, workers: Sequence[str]) -> bool:
        return self._all_ok(self._ask(workers, "leave", {}, self._limits.hang_s)) if workers else True

    def _agree_on_state(self, workers: Sequence[str]) -> bool:
        """Whoever is behind, or new, takes the state of the most advanced. Usually nobody is."""
        members = {worker: self._crew.members[worker] for worker in workers}
        holders = {worker: m.progress for worker, m in members.items() if m.holds_state}
        if not holders:
            return True
        source = most_advanced(holders)
        behind = [w for w, m in members.items() if w not in holders or m.progress.order != holders[source].order]
        if not behind:
            return True
        given = self._ask([source], "state", {}, self._limits.setup_s)
        if not self._all_ok(given):
            return False
        outcome = given[source]
        assert isinstance(outcome, Ok)
        taken = self._ask(behind, "load", {"data": outcome.value}, self._limits.setup_s)
        for worker in behind:  # one that has it can hand it on, should all the others fail now
            self._crew.members[worker].holds_state = isinstance(taken[worker], Ok)
        return self._all_ok(taken)

    def _prepare(self, fresh: Sequence[str], hook: Any) -> bool:
        given = {worker: {"hook": hook, "rank": self._crew.members[worker].rank} for worker in fresh}
        outcomes = self._crew.ask(
            fresh,
            "prepare",
            lambda worker: given[worker],
            limit_s=self._limits.setup_s,
            generation=self.generation,
        )
        self._refuse_unfinished(outcomes)
        return self._all_ok(outcomes)

    def _refuse_unfinished(self, outcomes: dict[str, Outcome]) -> None:
        """User code that does not end while workers are set up is not tried twice: it would take as long again. A process that
        does not answer can be a stopped one: after the first generation, that is a failed worker like any other."""
        hanging = {w: o for w, o in outcomes.items() if isinstance(o, Lost) and o.reason == "hang"}
        guilty = [self._crew.unfinished[worker] for worker in hanging if worker in self._crew.unfinished]
        if hanging and not guilty and not self._has_formed:
            guilty = [outcome.cause for outcome in hanging.values()]
        if guilty:
            raise WorkerStartError(unfinished_story(guilty))

    def _meet(self, workers: Sequence[str]) -> bool:
        self.generation += 1
        nodes = [self._crew.members[worker].node for worker in workers]
        seats = assign_seats(nodes, generation=self.generation)
        offers = self._offers(workers)
        if offers is None:
            return False
        settings = self._backend.plan(seats, offers)
        places = {w: {"seat": s, "settings": given} for w, s, given in zip(workers, seats, settings, strict=True)}

        def cancel() -> None:
            self._backend.plan([])
            self.interrupt(workers)

        outcomes = self._crew.ask(
            workers,
            "join",
            lambda worker: places[worker],
            limit_s=self._limits.join_s + 10,
            generation=self.generation,
            on_trouble=cancel,
        )
        return self._all_ok(outcomes)

    def _offers(self, workers: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return what the backend needs from each worker to plan, in this order; None when a worker failed."""
        if not self._backend.needs_offers:
            return []
        outcomes = self._ask(workers, "offer", {}, self._limits.join_s)
        if not self._all_ok(outcomes):
            return None
        return [outcome.value for outcome in outcomes.values() if isinstance(outcome, Ok)]

    def _build(self, fresh: Sequence[str], factory: Any) -> bool:
        seats = assign_seats([self._crew.members[w].node for w in fresh], generation=self.generation)
        places = {worker: {"factory": factory, "seat": seat} for worker, seat in zip(fresh, seats, strict=True)}
        outcomes = self._crew.ask(
            fresh,
            "build",
            lambda worker: places[worker],
            limit_s=self._limits.setup_s,
            generation=self.generation,
            on_trouble=lambda: self.interrupt(fresh),
        )
        self._refuse_unfinished(outcomes)
        return self._all_ok(outcomes)

    def _ask(self, workers: Sequence[str], verb: str, arguments: dict[str, Any], limit_s: float) -> dict[str, Outcome]:
        return self._crew.ask(workers, verb, arguments, limit_s=limit_s, generation=self.generation)

    def _all_ok(self, outcomes: dict[str, Outcome]) -> bool:
        """True when all went well; the user's own error is raised, a loss is False."""
        for worker, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                raise_user_error(outcome, self._crew.members[worker])
        return all(isinstance(outcome, Ok) for outcome in outcomes.values())

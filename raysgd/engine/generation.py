"""Form generations, and track whether the process group of the current one is up. Driver.

One attempt to form a generation: the members leave the old process group, agree on the most
advanced state, join the new group, and are set up where they are new. Leaving is a part of joining,
unless a state must be sent, workers are new, or an answer is missing, without which it is not known
how advanced a worker is. Each step can lose members, also in the middle of a recovery. Then the
attempt has failed, and the caller decides again with the workers that are left.

Where the ranks can share a state, they do so in the new group, when they have joined it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from raysgd.config import Limits
from raysgd.core.channel.messages import Interrupt
from raysgd.core.decisions.lease import GENERATIONS
from raysgd.core.decisions.policy import UNREACHABLE
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome, WorkerFailed
from raysgd.core.protocols import Call, ProcessGroupBackend
from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.core.snapshot import Snapshot, newest_state
from raysgd.engine.failure import no_room_error, raise_user_error, unfinished_error, warn_no_room
from raysgd.engine.watchdog import ask
from raysgd.engine.worker_info import Stage, WorkerInfo
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import WorkerStartError, counted
from raysgd.workers.transfer import AnyTransfer

logger = logging.getLogger("raysgd")

ATTEMPTS, MOST_CAUSES = 3, 8
SLOW_S = 15.0
# The phase of a recovery (`PHASES` of raysgd.core.decisions.policy) to which each question to the workers belongs.
PHASE_OF = {"leave": "leave", "prepare": "setup", "build": "setup", "attach": "setup", "offer": "join", "join": "join"}


class Generation:
    """Owns the generation's number, whether its process group is up, and what sets a worker up: the
    user's packed hook and factory. Never decides which workers form a generation, or why."""

    def __init__(
        self,
        table: WorkerTable,
        backend: ProcessGroupBackend,
        limits: Limits,
        *,
        factory: Any,
        hook: Any,
        saved: Callable[[bool], Snapshot | None] | None = None,
    ) -> None:
        self._table, self._backend, self.limits = table, backend, limits
        self._factory, self._hook, self._saved = factory, hook, saved
        self.number = table.group.term * GENERATIONS
        self.up = False  # whether the ranks can run collectives, as far as the driver knows
        self._has_formed = self._differ = False
        self.seconds: dict[str, float] = {}  # of the phases of a recovery, so far
        self._failures: dict[str, Interrupted | WorkerFailed] = {}  # of the newest attempt

    def take_seconds(self) -> dict[str, float]:
        """How long each phase took since the last call of this."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def note_seconds(self, phase: str, seconds: float) -> None:
        """Note how long a part of a phase took."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def end(self, *, differ: bool = False) -> None:
        """Note that the group has ended: the next call needs a new generation. In it, all take the
        first one's state if these `differ`."""
        self.up, self._differ = False, self._differ or differ

    def interrupt(self, workers: Sequence[str]) -> None:
        """Tell these workers that the generation has ended, so that they stop waiting for peers."""
        message = Interrupt(self.number)
        for worker in workers:
            self._table.group.send(worker, message)

    def causes(self) -> str:
        """Why the newest attempt to form a generation failed, by rank and machine."""
        causes = []
        for worker, outcome in self._failures.items():
            info = self._table.get(worker) or WorkerInfo(worker)
            rank = f"rank {info.rank} on {info.machine or 'this machine'}" if info.stage >= Stage.UP else "a new worker"
            causes.append(f"{rank}: {outcome.cause}")
        more = [f"and {len(causes) - MOST_CAUSES} more"] if len(causes) > MOST_CAUSES else []
        return "; ".join(causes[:MOST_CAUSES] + more)

    @property
    def in_place(self) -> bool:
        """Whether a process can leave one generation and join the next."""
        return self._backend.in_place

    # -- the first generation -------------------------------------------------------------------------

    def start(self, target: int, least: int) -> None:
        """Launch and set up the first workers: as many of `target` as fit, and at least `least`."""
        for attempt in range(1, ATTEMPTS + 1):
            room = self._table.group.room().free
            count = max(least, min(target, room))
            workers = self._table.launch(count)
            if self._wait_for_start(workers, target, least, no_room=count > room):
                if self.form(workers):
                    return
            else:
                failed = [info for info in self._table.failed() if info.worker in workers]
                self._failures = {info.worker: self._table.failure_of(info) for info in failed}
            causes = self.causes()
            self._table.dismiss(*workers)
            if any(failure.reason == UNREACHABLE for failure in self._failures.values()):
                raise WorkerStartError(causes)  # now, because a further attempt would wait as long
            logger.warning("workers failed during start-up (attempt %d of %d): %s", attempt, ATTEMPTS, causes)
        if any(isinstance(failure, WorkerFailed) for failure in self._failures.values()):
            raise WorkerStartError(
                f"workers failed {ATTEMPTS} times during start-up, before or in `setup` ({causes}). The usual causes are too "
                "little memory and crashes in native code: look for the workers' last output in Ray's logs"
            )
        raise WorkerStartError(
            f"the workers started {ATTEMPTS} times, but could not connect to each other ({causes}). Each worker must reach each "
            "other one, on any TCP port. Check routes and firewalls between these machines. If they reach each other by "
            "another network interface than the script's machine, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to it "
            "before `ray start` on each of them"
        )

    def _wait_for_start(self, workers: list[str], target: int, least: int, *, no_room: bool) -> bool:
        """Wait until the processes are up, and start others for those that have broken GPUs. Return
        False if one fails. Raise after the limit."""
        started = self._table.clock()
        warned = False
        while missing := [worker for worker in workers if self._table[worker].stage < Stage.UP]:
            waited = self._table.clock() - started
            if waited > self.limits.start_s:
                self._table.dismiss(*workers)
                raise no_room_error(self._table.group, len(missing), target, self.limits.start_s, no_room=no_room)
            if no_room:
                warned = warned or warn_no_room(self._table.group, len(missing), waited, self.limits.start_s)
            elif waited > SLOW_S and not warned:
                warned = True
                processes = counted(len(missing), "worker process is", "worker processes are")
                logger.warning("%s still starting after %.0f s", processes, waited)
            self._table.pump(0.2)
            if any(self._table[worker].ended is not None for worker in workers):
                return False
            for worker in [each for each in workers if self._table.park_if_excluded(each)]:
                workers.remove(worker)
                full = self._table.group.room().free <= 0
                if not full or len(workers) < least:
                    workers += self._table.launch(1)
                    no_room = no_room or full
        return True

    def attach(self, workers: Sequence[str]) -> dict[str, Outcome]:
        """Ask workers of an earlier driver what they have."""
        return self._ask(workers, "attach", {"factory": self._factory}, self.limits.setup_s)

    def enter(self, members: Sequence[str]) -> None:
        """Note the members, in rank order."""
        self._table.enter_group(members)
        self._has_formed = bool(members)

    def warm_up_arguments(self) -> dict[str, Any]:
        """What a replacement needs to be set up in a generation of its own."""
        return {"hook": self._hook, "factory": self._factory, "rank_info": RankInfo(solo=True), "settings": {}}

    # -- forming --------------------------------------------------------------------------------------

    def form(self, workers: Sequence[str], *, state: Any = None, saved: Snapshot | None = None) -> bool:
        """Try once to form a generation of these workers, in this order. New ones load `state`, if
        there is one; all load what was `saved`. Raise an error of the set-up."""
        self.up = False
        self.up = self._form(workers, state, saved)
        return self.up

    def _form(self, workers: Sequence[str], state: Any, saved: Snapshot | None) -> bool:
        self._table.expect_ranks(workers)
        built = self._select_built(workers)
        new = [worker for worker in workers if worker not in built]
        shares = self._backend.shares and not new  # who has no replica takes part in no broadcast
        if not self.hear_from(workers, leave=bool(new or (self._behind(built)[1] and not shares))):
            return False
        source, behind = self._behind(built) if saved is None else ("", [])
        if behind and not shares:
            with self._table.during("agreement"):
                answer = self._fetch(source)
                if answer is None or not self.load(behind, answer[0]):
                    return False
        if new and not self._prepare(new):
            return False
        with self._table.during("rendezvous"):
            if not self._rendezvous(workers, source, behind if shares else []):
                return False
        if new and not self._build(new):
            return False
        if new and state is not None and not self.load(new, state):
            return False
        if saved is not None and not self._load_saved(workers, saved):
            return False
        self.enter(workers)
        self._differ = False
        return True

    def _select_built(self, workers: Sequence[str]) -> list[str]:
        """Return those that have a replica."""
        return [w for w in workers if self.in_place and self._table[w].stage >= Stage.READY]

    def hear_from(self, workers: Sequence[str], *, leave: bool = False) -> bool:
        """Wait for the workers whose newest answer is missing, because an error ended that call:
        only this answer says which state they have. Members leave their group meanwhile, because
        these workers may wait for them in it; with `leave`, they do so in any case, and otherwise
        when they join the next one. Return False if a worker has failed."""
        built = [self._table[worker] for worker in self._select_built(workers)]
        leave = leave or not all(info.is_exact for info in built)
        asked = [info.worker for info in built if leave and (info.in_group or not info.is_exact)]
        return not asked or self._all_ok(self._ask(asked, "leave", {}, self.limits.hang_s))

    # -- states ---------------------------------------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """Whether a single worker has the state: otherwise, it is in checkpoints only."""
        return self._saved is None

    def newest_snapshot(self, *, wait: bool = False) -> Snapshot | None:
        """What new workers can start from. Without `wait`, this may be a checkpoint that is still
        being saved."""
        return self._table.snapshots.latest() if self._saved is None else self._saved(wait)

    def _load_saved(self, workers: Sequence[str], saved: Snapshot) -> bool:
        """Let all workers load a checkpoint. Return False if one has failed. Raise an error if the
        checkpoint cannot be loaded."""
        assert saved.load is not None

        def ask_all(call: Call) -> list[Any] | None:
            outcomes = self._ask(
                workers, "run", {"call": call}, self.limits.setup_s, on_trouble=lambda: self.interrupt(workers)
            )
            return [getattr(each, "value", None) for each in outcomes.values()] if self._all_ok(outcomes) else None

        return saved.load(ask_all)

    def _behind(self, workers: Sequence[str]) -> tuple[str, list[str]]:
        """Find the most advanced worker, and those that need its state: usually none. If none has
        the state of the group, the others begin with the first one's."""
        if not workers:
            return "", []
        if self._differ:
            return workers[0], [*workers[1:]]
        progress = self._table.progress_of(workers)
        source = newest_state(progress)
        assert source is not None
        order = progress[source].order
        same = [w for w in workers if order[0] and progress[w].order == order]
        return source, [worker for worker in workers if worker not in (source, *same)]

    def load(self, workers: Sequence[str], state: Any) -> bool:
        """Let workers load a state. Return False if one has failed. Raise an error of the
        operator's `load_state_dict` if it raises one."""
        with closing(self._table.group.transfer()) as transfer:
            transfer.fill(state)
            return self._all_ok(self._move(workers, "load", transfer))

    def _fetch(self, worker: str) -> tuple[Any, Progress] | None:
        """Return the worker's state with its progress, None if it has failed. Raise an error of the
        operator's `state_dict` if it raises one."""
        with closing(self._table.group.transfer()) as transfer:
            outcomes = self._move([worker], "state", transfer)
            return (transfer.data, outcomes[worker].progress) if self._all_ok(outcomes) else None

    def _move(self, workers: Sequence[str], verb: str, transfer: AnyTransfer) -> dict[str, Outcome]:
        arguments, limit_s = {"transfer": transfer.name}, self.limits.setup_s
        return self._ask(workers, verb, arguments, limit_s, on_trouble=transfer.close)

    def rescue_state(self, worker: str, call: int) -> bool:
        """Keep the state of a worker that is about to end as the snapshot, taken in call number
        `call`. Return whether the worker gave its state. Raise an error of the operator's
        `state_dict` if it raises one: the worker is healthy, and its state must not be lost for
        that."""
        if (answer := self._fetch(worker)) is None:
            return False
        self._table.snapshots.offer(Snapshot(*answer, call=call))
        return True

    def _prepare(self, new: Sequence[str]) -> bool:
        arguments = {worker: {"hook": self._hook, "rank": self._table[worker].rank} for worker in new}
        outcomes = self._ask(new, "prepare", arguments.__getitem__, self.limits.setup_s)
        self._raise_unfinished(outcomes)
        return self._all_ok(outcomes)

    def _raise_unfinished(self, outcomes: dict[str, Outcome]) -> None:
        """Raise an error if user code does not end while workers are set up, because a second
        attempt would take as long. A process that does not answer may be stopped: after the first
        generation, it counts as a failed worker instead."""
        hanging = {w: o for w, o in outcomes.items() if isinstance(o, WorkerFailed) and o.reason == "hang"}
        stories = [story for worker in hanging if (story := self._table[worker].unfinished)]
        if stories:
            raise unfinished_error(stories)
        if hanging and not self._has_formed:
            raise unfinished_error([outcome.cause for outcome in hanging.values()], silent=True)

    def _rendezvous(self, workers: Sequence[str], source: str, behind: Sequence[str]) -> bool:
        """Let the workers join a new group, in which those that are behind take the source's
        state."""
        self.number += 1
        nodes = [self._table[worker].node for worker in workers]
        local = all(self._table[worker].local for worker in workers)
        rank_infos = assign_ranks(nodes, generation=self.number, local=local)
        offers = self._collect_offers(workers)
        if offers is None:
            return False
        settings = self._backend.plan(rank_infos, offers)
        arguments = {
            w: {"rank_info": s, "settings": each} for w, s, each in zip(workers, rank_infos, settings, strict=True)
        }
        for worker in workers if behind else ():
            arguments[worker] |= {"giver": workers.index(source), "takes": worker in behind}

        def cancel() -> None:
            self._backend.plan([])
            self.interrupt(workers)

        limit_s = self.limits.join_s + 10 + (self.limits.setup_s if behind else 0.0)
        return self._all_ok(self._ask(workers, "join", arguments.__getitem__, limit_s, on_trouble=cancel))

    def _collect_offers(self, workers: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return what the backend needs from each worker to plan, or None if one has failed."""
        if not self._backend.needs_offers:
            return []
        outcomes = self._ask(workers, "offer", {}, self.limits.join_s)
        if not self._all_ok(outcomes):
            return None
        return [outcome.value for outcome in outcomes.values() if isinstance(outcome, Ok)]

    def _build(self, new: Sequence[str]) -> bool:
        rank_infos = assign_ranks([self._table[worker].node for worker in new], generation=self.number)
        arguments = {
            worker: {"factory": self._factory, "rank_info": rank_info}
            for worker, rank_info in zip(new, rank_infos, strict=True)
        }
        outcomes = self._ask(
            new, "build", arguments.__getitem__, self.limits.setup_s, on_trouble=lambda: self.interrupt(new)
        )
        self._raise_unfinished(outcomes)
        return self._all_ok(outcomes)

    def call(self, workers: Sequence[str], arguments: Callable[[str], Mapping[str, Any]]) -> bool:
        """Let some members make calls of their own. Return False if one has failed. Raise the error
        of the user's code: then a new generation must be formed."""
        self.up = False
        self.up = self._all_ok(self._ask(workers, "run", arguments, self.limits.hang_s, phase="stop"))
        return self.up

    # -- asking ---------------------------------------------------------------------------------------

    def _ask(
        self,
        workers: Sequence[str],
        verb: str,
        arguments: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
        limit_s: float,
        on_trouble: Callable[[], None] = lambda: None,
        phase: str = "state",
    ) -> dict[str, Outcome]:
        table, number, began = self._table, self.number, self._table.clock()
        try:
            return ask(table, workers, verb, arguments, limit_s=limit_s, generation=number, on_trouble=on_trouble)
        finally:
            self.note_seconds(PHASE_OF.get(verb, phase), table.clock() - began)

    def _all_ok(self, outcomes: dict[str, Outcome]) -> bool:
        """Whether all outcomes are Ok. Raise the error of user code."""
        for worker, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                raise_user_error(outcome, self._table[worker])
        broken = {worker: each for worker, each in outcomes.items() if isinstance(each, Interrupted | WorkerFailed)}
        has_failed = any(isinstance(each, WorkerFailed) for each in broken.values())
        if has_failed:  # its peers say only that they were interrupted
            broken = {worker: each for worker, each in broken.items() if isinstance(each, WorkerFailed)}
        self._failures = broken
        return not broken

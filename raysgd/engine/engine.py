"""The engine: keeps a group of workers alive. The only loop that knows about failure.

run(job):
    stand a generation if none stands
    repeat:
        fan the call out, and watch it          (watch.py)
        classify the outcomes                   (elastic.py, pure)
        done       -> return what the ranks said, piece by piece
        user error -> raise it as it is; the group stands again at the next call
        broken     -> decide (elastic.py, pure): rejoin, restart, wait or give up; then go on
        paused     -> stand a generation with the newcomers in, or the leavers out; then go on
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from raysgd.config import ElasticConfig, Limits
from raysgd.core.messages import FunctionReport
from raysgd.elastic import OUT_OF_STEP, Observation, Recovery, classify, different_calls
from raysgd.engine.crew import Crew, Group, Member
from raysgd.engine.failure import out_of_step_error, raise_user_error
from raysgd.engine.guard import CallGuard, Claim
from raysgd.engine.hanging import HangGuard
from raysgd.engine.ledger import Ledger
from raysgd.engine.membership import Membership
from raysgd.engine.pieces import Piece, pieces_since
from raysgd.engine.recovery import Recoverer
from raysgd.engine.recruiter import Recruiter
from raysgd.engine.standing import Standing
from raysgd.engine.watch import Watch
from raysgd.errors import ClusterError, NotActiveError
from raysgd.outcomes import Failed, Ok, Outcome
from raysgd.progress import Progress, most_advanced
from raysgd.protocols import Backend
from raysgd.snapshot import Snapshot

__all__ = ["Engine", "Job", "Piece"]

logger = logging.getLogger("raysgd")

CTRL_C_S = 5.0
CLOSE_S = 10.0
# How long a shutdown waits for a call in another thread, which it cancels; that call gives its workers CTRL_C_S.
RELEASE_S, RELEASE_LOOK_S = CTRL_C_S + CLOSE_S, 0.05
MEET_AT_MOST = 3


@dataclass(frozen=True)
class Job:
    """One call of the user's. `again` says what a loss means for it:

    resume   go on where the committed work ends (training)
    repeat   start it over on the new generation (validation, reading state)
    keep     what the survivors answered stands (functions of the user's that should not run twice)

    `arguments` that are made by a function are made anew whenever the call is fanned out.
    """

    method: str
    arguments: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    again: Literal["resume", "repeat", "keep"] = "repeat"
    max_losses: int = 3
    lead: int = 2  # how many steps ahead of everybody a planned stop is first proposed
    hurry_s: float | None = None  # how long ranks may go on after one stopped there; None: all come to the same step


class Engine:
    """Owns the group and the generation that stands. One thread at a time may call it: a second one gets an error."""

    def __init__(
        self,
        group: Group,
        backend: Backend,
        factory: Any,
        *,
        hook: Callable[[], Any] | None = None,
        target: int,
        least: int | None = None,
        elastic: ElasticConfig,
        limits: Limits,
        on_progress: Callable[[Member], None] = lambda member: None,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
        on_message: Callable[[FunctionReport, Any], None] = lambda message, body: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.group, self.limits, self._backend = group, limits, backend
        group.set_patience(limits.unreachable_s)
        self._crew = Crew(group, target, silent_s=limits.silent_s, clock=clock)
        self._crew.on_progress, self._crew.on_message = on_progress, on_message
        self._ledger = Ledger(on_recovery, clock)
        self._standing = Standing(self._crew, backend, limits, group.pack(factory), group.pack(hook), least)
        self._recruiter = Recruiter(self._crew, self._standing.warm, limits=limits, in_place=backend.in_place)
        tools = (self._crew, self._standing, self._recruiter)
        rules: Any = {"elastic": elastic, "limits": limits, "in_place": backend.in_place}
        self._membership = Membership(*tools, self._ledger, **rules)
        self._recoverer = Recoverer(*tools, self._membership, self._ledger, jitter=jitter, **rules)
        self._active, self._ended, self._reached = True, False, Progress()
        self._guard = CallGuard()
        self._calls = 0
        self._snapshot_is_stale = True
        self._unreachable = False  # Ray: that was reported

    # -- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Launches the first workers; an error in the user's set-up is raised as it is, with nothing left behind."""
        try:
            self._standing.start()
        except BaseException:
            self.stop(force=True)
            raise

    def stop(self, *, force: bool = False) -> None:
        """End every worker. A second call is fine, and finishes what Ctrl-C kept the first one from doing; a call that is
        running in another thread ends with an error."""
        if self._ended:
            return
        self._end_call_elsewhere()
        if self._active:
            self._reached, self._active = self.progress, False
        else:
            force = True
        try:
            if not force and self._standing.up:
                self._crew.ask(self._crew.seated(), "close", {}, limit_s=CLOSE_S)
        except (ClusterError, NotActiveError) as error:
            logger.warning("the workers are ended without closing them first: %s", error)
        finally:
            try:
                self._end_group(force)
            except KeyboardInterrupt:  # no worker must stay, because its resources would stay taken
                self._end_group(force)
                raise

    def _end_group(self, force: bool) -> None:
        try:
            self._backend.plan([])
            self.group.stop(force=force)
        except Exception:
            self._ended = True
            raise
        self._ended = True

    def _end_call_elsewhere(self) -> None:
        claim = self._guard.elsewhere()
        if claim is None:
            return
        thread = threading.current_thread().name
        self.cancel(NotActiveError(f"the trainer was shut down in thread {thread!r} while {claim.described()}"))
        deadline = time.monotonic() + RELEASE_S
        while self._guard.elsewhere() is not None and time.monotonic() < deadline:
            time.sleep(RELEASE_LOOK_S)
        self.cancel(None)

    def claim(self, call: str) -> Claim:
        """Return a context in which only this thread may call the engine: for a call that consists of several jobs."""
        return self._guard.claim(call)

    @property
    def world_size(self) -> int:
        return len(self._crew.seated())

    @property
    def target(self) -> int:
        """How many workers there should be."""
        return self._crew.target

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [self._crew.members[worker].node for worker in self._crew.seated()]

    @property
    def generation(self) -> int:
        """The number of the generation that stands."""
        return self._standing.former.generation

    @property
    def progress(self) -> Progress:
        """Of the rank that is furthest, as far as the driver has heard."""
        if not self._active:
            return self._reached
        told = {worker: self._crew.members[worker].progress for worker in self._crew.seated()}
        return told[most_advanced(told)] if told else Progress()

    @property
    def active(self) -> bool:
        return self._active

    def cancel(self, error: BaseException | None) -> None:
        """From any thread: the running call is cut short, and raises `error`. None takes it back."""
        self._crew.cancelled_by = error

    @property
    def recoveries(self) -> list[Recovery]:
        return self._ledger.recoveries

    def resize(self, count: int) -> None:
        """Sets how many workers there should be: too many leave, missing ones are awaited."""
        with self.claim("resize()"):
            self._be_ready(Job("resize", max_losses=-1), len(self.recoveries))
            self._membership.resize(count)
            if self._membership.due():
                with self.group.releasing():
                    self._change(Job("resize", max_losses=-1), len(self.recoveries))

    def remove(self, ranks: Sequence[int]) -> None:
        """Exactly these leave; the others move up."""
        job = Job("resize", max_losses=-1)
        with self.claim("remove_workers()"):
            self._be_ready(job, len(self.recoveries))
            seated = self._crew.seated()
            self._membership.let_go([seated[rank] for rank in ranks])
            with self.group.releasing():
                self._change(job, len(self.recoveries))

    def refer(self, rank: int, verb: str, arguments: dict[str, Any]) -> Any:
        """A Ray reference to a call on one rank, for the user to wait for. Losses are the user's to deal with."""
        return self.group.refer(self._crew.seated()[rank], verb, arguments)

    def state_changed_by_hand(self, *, replaced: bool = False) -> None:
        """The newest snapshot is not the whole truth any more; `replaced`: it is none at all."""
        self._snapshot_is_stale = True
        if replaced:
            self._crew.snapshots.forget()

    @contextmanager
    def state_replaced_by_hand(self) -> Iterator[None]:
        """The newest snapshot is void from the beginning on, as workers may send one of what they take; unless the
        replacement fails."""
        kept = self._crew.snapshots.latest()
        self.state_changed_by_hand(replaced=True)
        try:
            yield
        except BaseException:
            if kept is not None:
                self._crew.snapshots.offer(kept)
            raise

    # -- calls ----------------------------------------------------------------------------------------

    def pack(self, value: Any) -> Any:
        """A user's object, ready to travel as an argument of a job."""
        return self.group.pack(value)

    def run(self, job: Job) -> list[Piece]:
        """Runs one job to its end, whatever dies on the way; the pieces of work it took, in order."""
        with self.claim(f"the call {job.method!r}"):
            return self._run(job)

    def _run(self, job: Job) -> list[Piece]:
        mark = len(self.recoveries)
        self._calls += 1
        self._crew.current_call = self._calls
        self._be_ready(job, mark)
        if job.again == "resume" and self._membership.due():
            self._change(job, mark)
        pieces: list[Piece] = []
        cut_at: Progress | None = None  # where the newest network fault was, with all workers alive
        while True:
            watch, seen = self._fan_out(job)
            if seen.kind == "user_error":
                self._raise_user_error(watch, seen)
            if seen.reason == "network" and not seen.lost:
                again = cut_at is not None and self.progress.order <= cut_at.order
                detail = different_calls(watch.outcomes, again=again)
                cut_at = self.progress
                seen = Observation("out_of_step", reason=OUT_OF_STEP, detail=detail) if detail else seen
            if seen.kind == "out_of_step":
                self._raise_out_of_step(watch, seen)
            piece = Piece(tuple(watch.outcomes.values()))
            pieces = [*pieces, piece] if job.again == "resume" else [piece]
            if seen.kind == "done":
                return pieces
            if seen.kind == "paused":
                revived = self._change(job, mark)
            else:
                since = watch.troubled_at or self._crew.clock()
                revived = self._recoverer.recover(seen, since=since, max_losses=job.max_losses, mark=mark)
                stands = revived is None or revived.call == self._calls
                if job.again == "keep" and stands and (kept := _kept(watch.outcomes)) is not None:
                    return [kept]
            if revived is not None:
                pieces = pieces_since(revived, pieces, call=self._calls)

    def _fan_out(self, job: Job) -> tuple[Watch, Observation]:
        arguments = dict(job.arguments() if callable(job.arguments) else job.arguments)
        workers = self._crew.seated()

        def on_deadlock(why: str) -> None:
            for worker in workers:
                self._crew.kill(worker, "hang", why)

        watch = Watch(
            self._crew,
            HangGuard(self._crew, self.limits.hang_s, on_deadlock),
            wants_border=lambda: self._wants_border(job),
            on_trouble=lambda: self._standing.former.interrupt(workers),
            lead=job.lead,
            hurry_s=job.hurry_s,
        )
        if job.again == "resume":
            arguments |= {"call": self._calls, "snapshot_first": self._snapshot_is_stale}
        try:
            watch.run(workers, job.method, arguments, self._standing.former.generation)
        except BaseException as error:  # Ctrl-C, a cancelled call, an error in a listener of ours
            self._cut_short(watch, workers, error)
            raise
        newest = self._crew.snapshots.latest()
        if newest is not None and newest.call == self._calls:
            self._snapshot_is_stale = False
        return watch, classify(watch.outcomes)

    def _wants_border(self, job: Job) -> bool:
        """Looks for leavers in every call, as that also notices that Ray does not answer any more. Without Ray, training
        is an error; other calls raise it once for each outage, so that `save` works after that."""
        try:
            self._membership.look_for_leavers()
            self._unreachable = False
        except ClusterError:
            if self._unreachable and job.again != "resume":
                return False
            self._unreachable = True
            raise
        return job.again == "resume" and self._membership.wants_border()

    def _cut_short(self, watch: Watch, workers: list[str], error: BaseException) -> None:
        """Stops the call at the next border. The trainer stays usable; ranks that do not stop in time are ended."""
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"cut short by {type(error).__name__}"
        logger.warning("%s: stopping %d worker(s) at their next batch", what, len(workers))
        self._standing.up = False
        self._standing.former.interrupt(workers)
        for worker in watch.settle(CTRL_C_S):
            self._crew.kill(worker, "worker death", "it did not stop in time when the call was cut short")

    def _raise_user_error(self, watch: Watch, seen: Observation) -> NoReturn:
        self._standing.up = False
        assert seen.culprit is not None
        outcome = watch.outcomes[seen.culprit]
        assert isinstance(outcome, Failed)
        raise_user_error(outcome, self._crew.members[seen.culprit])

    def _raise_out_of_step(self, watch: Watch, seen: Observation) -> NoReturn:
        """As with any error of the user's, the workers that are alive stay; the next call begins without the others."""
        at, before = self.progress, len(self._crew.seated())
        self._standing.up = False
        fallen = self._crew.fallen()
        ranks = tuple(sorted(member.rank or 0 for member in fallen if member.seated))
        for member in fallen:
            self._crew.dismiss(member.worker)
        self._ledger.note(
            OUT_OF_STEP,
            lost=ranks,
            before=before,
            after=before - len(ranks),
            in_place=True,
            since=watch.troubled_at or self._crew.clock(),
            at=at,
            detail=seen.detail,
            goes_on=False,
        )
        raise out_of_step_error(seen.detail, at)

    def _be_ready(self, job: Job, mark: int) -> None:
        """A whole generation stands before a call: what died while idle is a loss like any other."""
        if not self._active:
            raise NotActiveError("this trainer was shut down; make a new one to go on (and load what you saved)")
        for attempt in itertools.count(1):
            while self._crew.pump(0.0):
                pass
            fallen = [member for member in self._crew.fallen() if member.seated]
            if fallen or not self._crew.seated():
                lost = self._crew.lost(fallen[0] if fallen else None)
                seen = Observation("broken", tuple(m.worker for m in fallen), None, lost.reason, lost.cause)
                self._recoverer.recover(seen, since=self._crew.clock(), max_losses=job.max_losses, mark=mark)
            elif self._standing.up:
                return
            elif not self._backend.in_place:
                seen = Observation("broken", reason="restart", detail="an error ended the generation")
                self._recoverer.recover(seen, since=self._crew.clock(), max_losses=job.max_losses, mark=mark)
            elif self._standing.form(self._crew.seated()):
                return
            elif attempt > MEET_AT_MOST and not self._crew.fallen():
                seen = Observation("broken", reason="network", detail="the ranks cannot meet, although all are alive")
                self._recoverer.recover(seen, since=self._crew.clock(), max_losses=job.max_losses, mark=mark)

    def _change(self, job: Job, mark: int) -> Snapshot | None:
        """A planned change of members; should it lose somebody on its way, a recovery."""
        since, world = self._crew.clock(), self.world_size
        reason = "preemption" if self._backend.in_place else self._membership.reason()
        if self._membership.change():
            return None
        detail = "workers left, or were lost, in a planned change"
        if not self._backend.in_place:
            detail = "a change of members: with this backend all processes are fresh after it"
        seen = Observation("broken", reason=reason, detail=detail)
        return self._recoverer.recover(seen, since=since, max_losses=job.max_losses, mark=mark, world=world)


def _kept(outcomes: Mapping[str, Outcome]) -> Piece | None:
    """The survivors' answers, when every survivor has one."""
    kept = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, Ok))
    interrupted = [o for o in outcomes.values() if not isinstance(o, Ok) and hasattr(o, "asked")]
    return None if interrupted or not kept else Piece(kept)

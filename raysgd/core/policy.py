"""Decide what a set of outcomes means, and what to do about it. Pure: no clock, no Ray, no logger.
Driver.

`classify` returns what happened, and `decide` returns what to do. Both get everything they need as
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raysgd.core.outcomes import CollectivePlace, Failed, Interrupted, Ok, Outcome, WorkerFailed
from raysgd.errors import counted

OUT_OF_STEP = "out of step"
UNREACHABLE = "unreachable"  # a worker that could not connect to the driver
# The reasons of planned changes, which are not failures.
PLANNED = ("growth", "shrink", "preemption", "restart", "batch", "takeover")
# The parts of a recovery, usually in this order.
PHASES = ("stop", "wait", "leave", "state", "setup", "join")
# A preempted machine usually has at least this long: the grace period of Google Cloud, and by default of Kubernetes.
ASSUMED_NOTICE_S = 30.0
# A worker leaves this long before its machine does, because all ranks must first finish their batch.
LEAVE_BEFORE_S = 10.0
# What hangs again at the same place, in another process, hangs because of the code or the data, not by chance.
MAX_HANGS = 2


@dataclass(frozen=True)
class Recovery:
    """One change of the workers, as users see it in `trainer.recoveries`.

    reason          "worker death", "node failure", "gpu failure", "hang", "network", "data loader"
                    or "out of step"; for a planned change, "preemption", "growth", "shrink" or
                    "restart"; "batch" for a batch that is trained again, because of what its code
                    does; "takeover" by a script that was started again
    removed_ranks   the ranks that failed, or that left in a planned change
    world_size_before, world_size_after  how many workers there were and are
    in_place        True if survivors continued with their state, False if training continued from a
                    snapshot, or with the state of a new worker
    batches_redone  how many committed batches were trained again
    seconds         how long the change took
    epoch, batch    where training was
    detail          the cause, with its evidence
    time            when it was over, in seconds since 1970
    step            batches trained since the start of training; for a training function its commits
                    and checkpoints, and in callbacks the number of its reports
    phases          seconds of its parts, of those that took any: "stop", until all ranks had
                    stopped; "wait" for machines, and for new processes to start; "leave" the old
                    process group; "state", in which ranks receive it from others or from a
                    snapshot; "setup" of new workers; "join" the new process group. The rest of
                    `seconds` is the driver's own work
    """

    reason: str
    removed_ranks: tuple[int, ...]
    world_size_before: int
    world_size_after: int
    in_place: bool
    batches_redone: int
    seconds: float
    epoch: int = 0
    batch: int = 0
    detail: str = ""
    time: float = field(default=0.0, compare=False, repr=False)
    step: int = field(default=0, compare=False, repr=False)
    phases: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Observation:
    """What the outcomes of one call on one generation mean.

    kind            "done": all ranks finished. "user_error": the user's code raised an error.
                    "broken": workers, the network or a data loader failed. "paused": all ranks
                    stopped because they were asked to. "out_of_step": the ranks did not make the
                    same collective calls, an error in the user's code
    failed_workers  the workers that failed, in rank order
    culprit         the worker whose code raised the error, or whose data loader failed
    leaving         the workers that leave in a planned change
    hung_at         where code hung on a failed worker, as in its outcome
    hangs           how many times in a row code has hung there in this call
    reason, detail  those of the `Recovery` that follows
    """

    kind: Literal["done", "user_error", "broken", "paused", "out_of_step"]
    failed_workers: tuple[str, ...] = ()
    culprit: str | None = None
    leaving: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    hung_at: tuple[str, int] | None = None
    hangs: int = 0


def classify(outcomes: Mapping[str, Outcome]) -> Observation:
    """Find what happened, from every worker's outcome (in rank order).

    A user's error takes precedence over everything that it caused on other ranks: peers whose
    collective failed are `Interrupted`, never `Failed`. A worker failure takes precedence over a
    pause. Ranks that were interrupted although no worker failed and the driver did not ask for it
    mean a network fault, unless one of them names another reason, or they were in collective calls
    that do not match.
    """
    failed_workers = tuple(worker for worker, outcome in outcomes.items() if isinstance(outcome, WorkerFailed))
    failed = [worker for worker, outcome in outcomes.items() if isinstance(outcome, Failed)]
    if failed:
        return Observation("user_error", failed_workers=failed_workers, culprit=failed[0])
    difference = different_calls(outcomes)
    if difference:
        return Observation("out_of_step", failed_workers=failed_workers, reason=OUT_OF_STEP, detail=difference)
    if failed_workers:
        first = outcomes[failed_workers[0]]
        assert isinstance(first, WorkerFailed)
        hung = [o.hung_at for o in outcomes.values() if isinstance(o, WorkerFailed) and o.hung_at is not None]
        return Observation(
            "broken",
            failed_workers=failed_workers,
            reason=first.reason,
            detail=first.cause,
            hung_at=hung[0] if hung else None,
        )
    interrupted = {worker: outcome for worker, outcome in outcomes.items() if isinstance(outcome, Interrupted)}
    for worker, outcome in interrupted.items():
        if outcome.reason:
            return Observation("broken", culprit=worker, reason=outcome.reason, detail=outcome.cause)
    unasked = [outcome for outcome in interrupted.values() if not outcome.asked]
    if unasked:
        return Observation("broken", reason="network", detail=unasked[0].cause)
    if interrupted:
        return Observation("paused")
    assert all(isinstance(outcome, Ok) for outcome in outcomes.values())
    return Observation("done")


def different_calls(outcomes: Mapping[str, Outcome], *, again: bool = False) -> str:
    """Find evidence that the ranks did not make the same collective calls, "" if there is none.

    Every rank's n-th call must be the same one. So each of these is proof:

    -   the backend received data of an unexpected size
    -   a rank is in a call beyond the last call of a rank that has finished
    -   two ranks are in their n-th call, and the calls differ
    -   two ranks began the same batch after different numbers of calls, or one is in a call beyond
        those with which another one has ended that batch
    -   two ranks are at the same line in the same batch, and one of them has made more calls in it
        than in the batch before (not for a call about objects, such as broadcast_object_list, which
        makes several collective calls itself, nor if a worker has died: it may have sent its part
        of a call to one of the two only)
    -   with `again` (no worker failed, for the second time at this place): the ranks are at
        different lines
    """
    ranks = list(enumerate(outcomes.values()))
    mismatched = [f"rank {r}: {o.cause}" for r, o in ranks if isinstance(o, WorkerFailed) and o.reason == OUT_OF_STEP]
    waiting = {r: o.place for r, o in ranks if isinstance(o, Interrupted) and not o.asked and o.place.name}
    numbered = {r: place for r, place in waiting.items() if place.count >= 0}
    finished = {r: o.collectives for r, o in ranks if isinstance(o, Ok) and o.collectives >= 0}
    beyond = max((place.count for place in numbered.values()), default=-1) > min(finished.values(), default=1 << 62)
    same = any(
        one.count == other.count and one.name != other.name for one in numbered.values() for other in numbered.values()
    )
    lines = {(place.name, place.line) for place in waiting.values()}
    places = {r: o.place for r, o in ranks if isinstance(o, Interrupted)}
    died = any(isinstance(o, WorkerFailed) and o.hung_at is None and o.reason != OUT_OF_STEP for _, o in ranks)
    drifted = drift(places) or ("" if died else _more_calls(numbered)) or (_unusual(places) if mismatched else "")
    if not (mismatched or beyond or same or drifted or (again and len(lines) > 1)):
        return ""
    stories = [
        f"rank {rank} is in {place.name}, {_nth(place.count)}called at {place.line or 'an unknown line'}"
        for rank, place in waiting.items()
    ]
    stories += [
        f"rank {rank} has finished, after {counted(count, 'collective call')}" for rank, count in finished.items()
    ]
    return "; ".join([*mismatched, *stories, *([drifted] if drifted else [])])


def drift(places: Mapping[int, CollectivePlace]) -> str:
    """Find evidence of different numbers of collective calls in a step, or ""."""
    return _drifted(places) or _ahead(places)


def _drifted(places: Mapping[int, CollectivePlace]) -> str:
    """Say which ranks began a batch after different numbers of calls: the first such batch."""
    known = [dict(place.begun) for place in places.values()]
    for step in sorted(set.intersection(*map(set, known))) if known else []:
        counts = {rank: begun[step] for rank, begun in zip(places, known, strict=True)}
        if len(set(counts.values())) > 1 and min(counts.values()) >= 0:
            listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
            most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
            only = _only(places, most, least, step - 1)
            return f"before step {step} there had been {listed} collective calls{only}"
    return ""


def _ahead(waiting: Mapping[int, CollectivePlace]) -> str:
    """Say which rank is in a call of a step that another rank has ended with fewer calls."""
    for rank, place in ((rank, place) for rank, place in waiting.items() if place.name):
        step = place.begun[-1][0] if place.begun else -2
        for other, theirs in waiting.items():
            made = dict(theirs.begun).get(step + 1, -1)
            if 0 <= made < place.count:
                only = _only(waiting, rank, other, step)
                return f"rank {other} has ended step {step} after {made} collective calls, and rank {rank} is still in it{only}"
    return ""


def _unusual(places: Mapping[int, CollectivePlace]) -> str:
    """Say at which lines a rank called a model in its newest step, and not in the one before."""
    for rank, place in places.items():
        for step in sorted({at for at, _ in place.called}, reverse=True):
            now, before = (Counter(line for at, line in place.called if at == each) for each in (step, step - 1))
            if before and (lines := ", ".join(now - before)):
                return f"in step {step}, and not in the one before, rank {rank} called a model at {lines}"
    return ""


def _only(places: Mapping[int, CollectivePlace], rank: int, other: int, step: int) -> str:
    """Say at which lines only one of these ranks called a model in this step."""
    mine, theirs = (Counter(line for at, line in places[each].called if at == step) for each in (rank, other))
    lines = ", ".join(mine - theirs)
    return f"; in step {step} rank {rank}, and not rank {other}, called a model at {lines}" if lines else ""


def _more_calls(waiting: Mapping[int, CollectivePlace]) -> str:
    """Say which ranks are at the same line of the same batch after different numbers of calls in
    it, where one of them has made more calls than in the batch before."""
    found: dict[tuple[int, int, str, str], dict[int, int]] = {}
    for rank, place in waiting.items():
        if len(place.begun) > 1 and "_object" not in place.name:
            (before, earlier), (step, at) = place.begun[-2:]
            usual = at - earlier if step == before + 1 else 1 << 62
            found.setdefault((step, usual, place.name, place.line), {})[rank] = place.count - at
    for (step, usual, name, _), counts in found.items():
        if len(set(counts.values())) > 1 and max(counts.values()) > usual:
            listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
            return f"in step {step} there were, up to this {name}, {listed} collective calls, and {usual} in the step before"
    return ""


def _nth(count: int) -> str:
    return f"its collective call number {count}, " if count >= 0 else ""


@dataclass(frozen=True)
class Situation:
    """What `decide` needs to know. `ready` and `starting` count replacements; `gathered`: no more
    are expected soon; `hangs` counts those in a row at one place of the call."""

    survivors: int
    ready: int
    starting: int
    free: int
    target: int
    min_workers: int
    failures: int
    max_failures: int
    attempts: int
    max_attempts: int
    gathered: bool = True
    hangs: int = 0


@dataclass(frozen=True)
class Rejoin:
    """Form the next generation now, from the survivors and the replacements that are ready."""


@dataclass(frozen=True)
class Restart:
    """Start `count` new processes. Keep the survivors and the replacements that are ready."""

    count: int


@dataclass(frozen=True)
class Wait:
    """Wait for more workers: `seconds` long, or until something changes."""

    seconds: float


@dataclass(frozen=True)
class GiveUp:
    """Raise an error, because a limit was reached. `why` is its text."""

    why: str


Decision = Rejoin | Restart | Wait | GiveUp


def backoff(attempt: int, first_s: float, max_s: float, jitter: float) -> float:
    """The next pause. It grows exponentially; a jitter in [0, 1) shortens it by up to half, so that
    several trainers do not retry at the same time."""
    return float(min(max_s, first_s * 2.0 ** min(attempt, 60)) * (1.0 - 0.5 * jitter))


def decide(now: Situation, *, wait_s: float) -> Decision:
    """Decide what to do after a failure, or in a planned change. `wait_s` is the next pause."""
    if now.max_failures >= 0 and now.failures > now.max_failures:
        return GiveUp(
            f"{counted(now.failures, 'failure')} in one call, and max_retries={now.max_failures} allows no more"
        )
    if now.hangs >= MAX_HANGS:
        return GiveUp(
            f"the code has hung {now.hangs} times in a row at the same place of the call. Another attempt would probably hang there too, "
            "and take another hang_timeout_s"
        )
    available = now.survivors + now.ready
    if available >= now.min_workers and available > 0 and (now.survivors >= now.min_workers or now.gathered):
        return Rejoin()
    missing = now.target - available - now.starting
    if now.starting == 0 and now.free > 0 and available + now.free >= now.min_workers:
        return Restart(max(1, min(missing, now.free)))
    more = min(missing, now.free - now.starting)  # those that are starting may not hold their resources yet
    if now.starting > 0 and now.survivors == 0 and more > 0:
        return Restart(more)
    if now.starting == 0 and now.attempts >= now.max_attempts:
        return GiveUp(
            f"there were not enough resources after {now.max_attempts} waits in a row: min_workers={now.min_workers}, "
            f"{counted(available, 'worker is', 'workers are')} available, and the cluster has room for {now.free} more"
        )
    return Wait(wait_s)


# -- replacements and spares --------------------------------------------------------------------------


def count_to_launch(*, missing: int, spares: int, ready: int, starting: int, room: int) -> int:
    """Decide how many workers to start, for free places and hot spares. Those that are there take
    the places first, so spares are what a full cluster leaves out."""
    return max(min(max(missing, 0) + spares - ready - starting, room), 0)


def is_time_to_join(*, missing: int, ready: int, starting: int, waited_s: float, patience_s: float) -> bool:
    """Whether ready workers should join, or wait for others that are starting, because one change
    is better than several. The newest one has been ready for `waited_s`."""
    return min(missing, ready) > 0 and (ready >= missing or starting == 0 or waited_s > patience_s)


def leave_within_s(deadline_s: float | None) -> float:
    """In how many seconds a worker must leave whose machine goes in `deadline_s`."""
    return (ASSUMED_NOTICE_S if deadline_s is None else deadline_s) - LEAVE_BEFORE_S


def is_time_to_leave(
    *, missing: int, ready: int, starting: int, left_s: float, grows: bool, enough: bool = True
) -> bool:
    """Whether a preempted worker leaves at the next batch boundary, or waits there for its
    replacement. It must have left in `left_s`; `missing` counts the places of all that are
    preempted. `grows` is whether replacements may join during a call, and `enough` whether as many
    workers as training needs are there without those that are preempted."""
    return left_s <= 0 or (enough and (not grows or ready >= missing or starting == 0))

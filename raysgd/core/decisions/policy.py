"""Decide what a set of outcomes means, and what to do about it. Pure: no clock, no Ray, no logger.
Driver.

`classify` returns what happened, and `decide` returns what to do. Both get everything they need as
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raysgd.core.outcomes import CollectiveCalls, Failed, Interrupted, Ok, Outcome, WorkerFailed
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
                    snapshot or a checkpoint, or with the state of a new worker
    batches_redone  how many committed batches were trained again
    seconds         how long the change took
    epoch, batch    where training was
    detail          the cause, with its evidence
    time            when it was over, in seconds since 1970
    step            batches trained since the start of training; for a training function its commits
                    and checkpoints, and in callbacks the number of its reports
    phases          seconds of its parts, of those that took any: "stop", until all ranks had
                    stopped; "wait" for machines, and for new processes to start; "leave" the old
                    process group; "state", in which ranks receive it from a snapshot, or through
                    the driver; "setup" of new workers; "join" the new process group, in which ranks
                    give it to each other. The rest of `seconds` is the driver's own work
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
    culprit         the worker whose code raised the error, or whose data loader failed
    leaving         the workers that leave in a planned change
    hung_at         where code hung on a failed worker, as in its outcome
    hangs           how many times in a row code has hung there in this call
    reason, detail  those of the `Recovery` that follows
    """

    kind: Literal["done", "user_error", "broken", "paused", "out_of_step"]
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
    mean a network fault, unless one of them names another reason.
    """
    failed = [worker for worker, outcome in outcomes.items() if isinstance(outcome, Failed)]
    if failed:
        return Observation("user_error", culprit=failed[0])
    difference = different_calls(outcomes)
    if difference:
        return Observation("out_of_step", reason=OUT_OF_STEP, detail=difference)
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, WorkerFailed)]
    if failures:
        hung_at = next((each.hung_at for each in failures if each.hung_at is not None), None)
        return Observation("broken", reason=failures[0].reason, detail=failures[0].cause, hung_at=hung_at)
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


def different_calls(outcomes: Mapping[str, Outcome]) -> str:
    """Find proof that the ranks did not make the same collective calls, "" if there is none:

    -   the backend received data of an unexpected size
    -   a rank is in a call beyond the last call of a rank that has finished
    -   two ranks began the same step after different numbers of calls, or one is in a call beyond
        those with which another one has ended that step
    """
    ranks = list(enumerate(outcomes.values()))
    for rank, outcome in ranks:
        if isinstance(outcome, WorkerFailed) and outcome.reason == OUT_OF_STEP:
            return f"rank {rank}: {outcome.cause}"
    finished = {rank: o.collectives for rank, o in ranks if isinstance(o, Ok) and o.collectives >= 0}
    by_rank = {rank: o.collectives for rank, o in ranks if isinstance(o, Interrupted)}
    for rank, outcome in ranks:
        if isinstance(outcome, Interrupted) and not outcome.asked and finished:
            other = min(finished, key=finished.__getitem__)
            if outcome.collectives.waits_in > finished[other]:
                return f"rank {other} has finished, and rank {rank} is in a collective call after its last one"
    return _drifted(by_rank) or _ahead(by_rank)


def _drifted(by_rank: Mapping[int, CollectiveCalls]) -> str:
    """Say which ranks began a step after different numbers of calls: the first such step."""
    known = [dict(calls.begun) for calls in by_rank.values()]
    for step in sorted(set.intersection(*map(set, known))) if known else []:
        counts = {rank: begun[step] for rank, begun in zip(by_rank, known, strict=True)}
        if len(set(counts.values())) > 1 and min(counts.values()) >= 0:
            listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
            return f"before step {step} there had been {listed} collective calls"
    return ""


def _ahead(by_rank: Mapping[int, CollectiveCalls]) -> str:
    """Say which rank is in a call of a step that another rank has ended with fewer calls."""
    for rank, calls in by_rank.items():
        step = calls.begun[-1][0] if calls.begun else -2
        for other, theirs in by_rank.items():
            if 0 <= (count := dict(theirs.begun).get(step + 1, -1)) < calls.waits_in:
                ended = counted(count, "collective call")
                return f"rank {other} has ended step {step} after {ended}, and rank {rank} is in call {calls.waits_in}"
    return ""


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

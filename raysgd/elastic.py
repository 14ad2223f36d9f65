"""What to make of a set of outcomes, and what to do about it. Pure: no clock, no Ray, no logger.

`classify` says what happened; `decide` says what to do. Both get everything they need as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raysgd.outcomes import Failed, Interrupted, Lost, Ok, Outcome

__all__ = [
    "Decision",
    "GiveUp",
    "Observation",
    "Recovery",
    "Rejoin",
    "Restart",
    "Situation",
    "Wait",
    "backoff",
    "classify",
    "decide",
]

Reason = Literal[
    "worker death", "node loss", "hang", "network", "data loader", "preemption", "growth", "shrink", "restart"
]


@dataclass(frozen=True)
class Recovery:
    """One change of membership, as the user sees it in `trainer.recoveries`."""

    reason: str
    lost_ranks: tuple[int, ...]
    world_size_before: int
    world_size_after: int
    in_place: bool
    batches_redone: int
    seconds: float
    epoch: int = 0
    batch: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Observation:
    """What the outcomes of one call on one generation amount to.

    kind: "done" everybody finished; "user_error" somebody's own code raised; "broken" members were lost, the network
    failed or a data loader did; "paused" everybody stopped because they were asked to. `culprit` is the worker whose
    code raised, or whose data loader failed.
    """

    kind: Literal["done", "user_error", "broken", "paused"]
    lost: tuple[str, ...] = ()
    culprit: str | None = None
    reason: str = ""
    detail: str = ""


def classify(outcomes: Mapping[str, Outcome]) -> Observation:
    """What happened, from every worker's outcome (in rank order).

    A user's error wins over everything that it caused in others: peers that fall out of a collective are
    `Interrupted`, never `Failed`. A loss wins over a pause. Interrupted ranks with nobody lost and nobody
    asking are a network fault, unless one of them names another reason.
    """
    lost = tuple(worker for worker, outcome in outcomes.items() if isinstance(outcome, Lost))
    failed = [worker for worker, outcome in outcomes.items() if isinstance(outcome, Failed)]
    if failed:
        return Observation("user_error", lost=lost, culprit=failed[0])
    if lost:
        first = outcomes[lost[0]]
        assert isinstance(first, Lost)
        return Observation("broken", lost=lost, reason=first.reason, detail=first.cause)
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


@dataclass(frozen=True)
class Situation:
    """Where a trainer stands after a loss, in numbers. `gathered`: no more recruits are expected soon."""

    survivors: int
    ready: int
    starting: int
    free: int
    target: int
    min_workers: int
    in_place: bool
    losses: int
    max_losses: int
    attempts: int
    max_attempts: int
    gathered: bool = True


@dataclass(frozen=True)
class Rejoin:
    """Survivors (and recruits that are warm) form the next generation now."""


@dataclass(frozen=True)
class Restart:
    """Start `count` fresh processes; those that stand (survivors, recruits) are kept."""

    count: int


@dataclass(frozen=True)
class Wait:
    """Not enough of anything. Wait `seconds`, or until something changes."""

    seconds: float


@dataclass(frozen=True)
class GiveUp:
    """The bound is reached; `why` goes into the error."""

    why: str


Decision = Rejoin | Restart | Wait | GiveUp


def backoff(attempt: int, first_s: float, max_s: float, jitter: float) -> float:
    """Exponential, with jitter in [0, 1) taking off up to half, so that many trainers do not wake together."""
    return float(min(max_s, first_s * 2.0 ** min(attempt, 60)) * (1.0 - 0.5 * jitter))


def decide(now: Situation, *, wait_s: float) -> Decision:
    """What to do after a loss. `wait_s` is the next backoff, should it come to waiting."""
    if now.max_losses >= 0 and now.losses > now.max_losses:
        return GiveUp(f"{now.losses} losses in one call, and max_retries={now.max_losses} allows no more")
    standing = now.survivors + now.ready
    if standing >= now.min_workers and standing > 0 and (now.survivors >= now.min_workers or now.gathered):
        return Rejoin()
    missing = now.target - standing - now.starting
    if now.starting == 0 and now.free > 0 and standing + now.free >= now.min_workers:
        return Restart(max(1, min(missing, now.free)))
    if now.starting == 0 and now.attempts >= now.max_attempts:
        return GiveUp(
            f"{now.max_attempts} waits for resources in a row ended without them "
            f"(min_workers={now.min_workers}, standing={standing}, room for {now.free} more)"
        )
    return Wait(wait_s)

"""How an error on a worker reaches the user: with its own type, its rank and its remote traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from raysgd.elastic import Recovery
from raysgd.engine.worker_table import WorkerInfo
from raysgd.errors import OutOfStepError, RemoteTraceback, TrainingFailedError
from raysgd.outcomes import DATA_LOADER, Failed
from raysgd.progress import Progress

__all__ = ["out_of_step_error", "raise_user_error", "story_of", "unfinished_story"]

LOADER_HINT = (
    "The usual cause of a loader process's death is memory. Use fewer loader processes (num_workers of the DataLoader), "
    "smaller batches or a smaller prefetch_factor, or a machine or container with more memory. After SIGBUS, enlarge the "
    "shared memory (docker run --shm-size=..., or an emptyDir with medium: Memory at /dev/shm in Kubernetes)."
)


def raise_user_error(outcome: Failed, member: WorkerInfo) -> NoReturn:
    """Raise what the user's code raised. In this process the error still has its own traceback.

    `raysgd_rank` tells a KeyboardInterrupt of a worker's code from Ctrl-C in the script.
    """
    error = outcome.error
    rank = "a new worker" if member.rank is None else f"rank {member.rank}"
    vars(error)["raysgd_rank"] = member.rank  # not by assignment, which an exception class can refuse
    if error.__traceback__ is not None:
        raise error
    where = f"on {rank} (process {member.pid} on node {member.node[:8]}):"
    raise error from RemoteTraceback(f"{where}\n{outcome.traceback}")


def unfinished_story(stories: Sequence[str]) -> str:
    """Return the text of the error about workers whose set-up did not end."""
    return "\n".join(
        [
            *stories,
            "If it only needs more time, raise the limit: elastic=ElasticConfig(hang_timeout_s=...). It was not tried again, "
            "since it would take as long again.",
        ]
    )


def out_of_step_error(detail: str, at: Progress) -> OutOfStepError:
    """Return the error about ranks that did not make the same collective calls."""
    return OutOfStepError(
        f"the ranks are out of step in epoch {at.epoch}, batch {at.batches + 1}: {detail}. Most likely some ranks make a "
        "collective call (all_reduce, barrier, broadcast, all_gather, ...) that others do not make, for example under "
        "`if rank == 0:`, or make it in another order or with tensors of another size. Every rank must make the same "
        "calls in the same order. It was not retried. What was summed up since then may be wrong: after mending it, load "
        "the newest checkpoint"
    )


def story_of(why: str, recoveries: list[Recovery]) -> TrainingFailedError:
    """The whole story of a call that was given up, loss by loss."""
    lines = [f"training was given up: {why}."]
    for recovery in recoveries:
        ranks = ", ".join(map(str, recovery.lost_ranks)) or "none"
        lines.append(
            f"  {recovery.reason} in epoch {recovery.epoch}, batch {recovery.batch}, ranks lost: {ranks}"
            f" ({recovery.world_size_before} -> {recovery.world_size_after} workers): {recovery.detail}"
        )
    if any(recovery.reason == DATA_LOADER for recovery in recoveries):
        lines.append(LOADER_HINT)
    lines.append(
        "Give train() a larger max_retries (-1 for no bound) if losses like these are normal here; "
        "the same batch each time points to the batch or the code."
    )
    return TrainingFailedError("\n".join(lines))

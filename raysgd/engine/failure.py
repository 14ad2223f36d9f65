"""Create the errors that end a call, as users see them. Driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from raysgd.core.outcomes import DATA_LOADER, Failed
from raysgd.core.policy import Recovery
from raysgd.core.progress import Progress
from raysgd.engine.worker_table import WorkerInfo
from raysgd.errors import OutOfStepError, RemoteTraceback, ResourceError, TrainingFailedError, WorkerStartError
from raysgd.workers.worker_group import WorkerGroupProtocol

__all__ = [
    "failed_error",
    "no_room_error",
    "out_of_step_error",
    "raise_user_error",
    "unfinished_error",
    "warn_no_room",
]

logger = logging.getLogger("raysgd")

QUIET_S = 2.0

LOADER_HINT = (
    "Data-loader processes usually die because memory runs out. Use fewer loader processes (num_workers of the DataLoader), "
    "smaller batches or a smaller prefetch_factor, or a machine or container with more memory. After SIGBUS, enlarge the "
    "shared memory (docker run --shm-size=..., or an emptyDir with medium: Memory at /dev/shm in Kubernetes)."
)


def raise_user_error(outcome: Failed, info: WorkerInfo) -> NoReturn:
    """Raise what the user's code raised on a worker. An error that was raised in this process keeps its own traceback.

    Set the error's `raysgd_rank`, which distinguishes a KeyboardInterrupt of a worker's code from Ctrl-C in the script.
    """
    error = outcome.error
    rank = "a new worker" if info.rank is None else f"rank {info.rank}"
    vars(error)["raysgd_rank"] = info.rank  # not by assignment, which an exception class can refuse
    if error.__traceback__ is not None:
        raise error
    where = f"on {rank} (process {info.pid} on node {info.node[:8]}):"
    raise error from RemoteTraceback(f"{where}\n{outcome.traceback}")


def unfinished_error(stories: Sequence[str]) -> WorkerStartError:
    """Return the error about workers whose set-up did not end in time."""
    advice = (
        "If the set-up only needs more time, raise the limit: elastic=ElasticConfig(hang_timeout_s=...). raysgd did not try "
        "again, because a second attempt would take as long."
    )
    return WorkerStartError("\n".join([*stories, advice]))


def no_room_error(group: WorkerGroupProtocol, missing: int, target: int, limit_s: float) -> ResourceError:
    """Return the error about workers for which the cluster had no room in time."""
    return ResourceError(
        f"the cluster had no room for {missing} of {target} workers within {limit_s:g} s: they need "
        f"{group.demand(missing)}, and an empty cluster could hold {group.capacity()} such worker(s). "
        "Ask for fewer workers or smaller ones (num_workers, num_cpus_per_worker, resources_per_worker), add nodes, "
        "or, on one machine, start Ray yourself with more logical CPUs: ray.init(num_cpus=...)"
    )


def warn_no_room(group: WorkerGroupProtocol, missing: int, waited_s: float, limit_s: float) -> bool:
    """Log what workers are waiting for, unless the wait has only begun. Return whether it was logged."""
    if waited_s < QUIET_S:
        return False
    logger.warning("%d worker(s) are waiting for %s, for at most %.0f s", missing, group.demand(missing), limit_s)
    return True


def out_of_step_error(detail: str, at: Progress) -> OutOfStepError:
    """Return the error about ranks that did not make the same collective calls."""
    return OutOfStepError(
        f"the ranks are out of step in epoch {at.epoch}, batch {at.batches + 1}: {detail}. Most likely some ranks make a "
        "collective call (all_reduce, barrier, broadcast, all_gather, ...) that others do not make, for example under "
        "`if rank == 0:`, or make it in another order or with tensors of another size. Every rank must make the same "
        "calls in the same order. raysgd did not retry the call. Gradients and other sums may have been wrong since then: fix "
        "the code, and load the newest checkpoint"
    )


def failed_error(why: str, recoveries: list[Recovery]) -> TrainingFailedError:
    """Return the error about a call that raysgd gave up, with each of its recoveries."""
    lines = [f"training failed: {why}."]
    for recovery in recoveries:
        ranks = ", ".join(map(str, recovery.removed_ranks)) or "none"
        lines.append(
            f"  {recovery.reason} in epoch {recovery.epoch}, batch {recovery.batch}, failed ranks: {ranks}"
            f" ({recovery.world_size_before} -> {recovery.world_size_after} workers): {recovery.detail}"
        )
    if any(recovery.reason == DATA_LOADER for recovery in recoveries):
        lines.append(LOADER_HINT)
    lines.append(
        "If you expect such failures, pass train() a larger max_retries (-1 for no limit). If it is the same batch each "
        "time, look for the cause in that batch or in the code."
    )
    return TrainingFailedError("\n".join(lines))

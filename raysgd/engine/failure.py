"""Create the errors that end a call, as users see them. Driver."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from raysgd import errors
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import DATA_LOADER, Failed
from raysgd.engine.worker_info import WorkerInfo
from raysgd.environment import START_LIMIT
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.tracebacks import readable
from raysgd.workers.worker_group import WorkerGroupProtocol

logger = logging.getLogger("raysgd")

QUIET_S = 2.0
MORE_ROOM = (
    "Ask for fewer workers (num_workers; with parts= and a larger batch_size, a TorchTrainer has the same numbers) or smaller "
    "ones (num_cpus_per_worker, resources_per_worker), add nodes, or, on one machine, start Ray yourself with more logical CPUs: "
    "ray.init(num_cpus=...)"
)

MEMORY_HINT = (
    "The GPU's memory is full. Divide the batch into more parts with TorchTrainer(parts=...), use smaller batches (with "
    'TrainingOptions(accumulate=...), several share one step), or TrainingOptions(precision="bf16")'
)
NO_GROUP_HINT = (
    "One worker trains without a process group, so torch's collective calls fail there. Guard yours with `if self.world_size > 1`, or "
    "use num_workers=2"
)
ONE_ROW_HINT = (
    "BatchNorm cannot train on a single value, and a rank had one row. Usually it is the last step of an epoch, which the ranks divide: "
    "pass drop_last=True to the training loader, or another batch_size"
)
UNUSED_HINT = (
    "Layers that were frozen after self.register() have no gradient, as layers that some batches do not use: pass "
    "ddp_args={'find_unused_parameters': True} to self.register()"
)
# What to do about errors of torch, by the name of the type and a part of the text.
HINTS = (
    ("OutOfMemoryError", "", MEMORY_HINT),
    ("ValueError", "Default process group has not been init", NO_GROUP_HINT),
    ("ValueError", "Expected more than 1 value per channel", ONE_ROW_HINT),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration", UNUSED_HINT),
)
LOADER_HINT = (
    "Data-loader processes usually die because memory runs out. Use fewer loader processes (num_workers of the DataLoader), "
    "smaller batches or a smaller prefetch_factor, or a machine or container with more memory. After SIGBUS, enlarge the "
    "shared memory (docker run --shm-size=..., or an emptyDir with medium: Memory at /dev/shm in Kubernetes)."
)

UNDEFINED = (
    "the state of this trainer is undefined, because a load failed while it changed the state. Only load(), load_state_dict() and "
    "shutdown() work now. Load a checkpoint that the operator accepts"
)


def raise_user_error(outcome: Failed, info: WorkerInfo) -> NoReturn:
    """Raise what the user's code raised on a worker. An error that was raised in this process keeps
    its own traceback.

    Set the error's `raysgd_rank`, which distinguishes a KeyboardInterrupt of a worker's code from
    Ctrl-C in the script.
    """
    error = outcome.error
    rank = "a new worker" if info.rank is None else f"rank {info.rank}"
    vars(error)["raysgd_rank"] = info.rank  # not by assignment, which an exception class can refuse
    kind = type(error)
    for name, text, hint in HINTS if hasattr(error, "add_note") else ():  # from Python 3.11 on
        # Ray's error of this name is about the machine's memory.
        if kind.__name__ == name and text in errors.text_of(error) and not kind.__module__.startswith("ray."):
            error.add_note(hint)
    if error.__traceback__ is not None:
        raise error
    where = f"on {rank} (process {info.pid} on node {info.machine}):"
    raise error from errors.RemoteTraceback(f"{where}\n{readable(outcome.traceback, error)}")


def unfinished_error(stories: Sequence[str], *, silent: bool = False) -> errors.WorkerStartError:
    """The error about workers whose set-up did not end in time, or that were `silent` for too long
    in it."""
    limit = (
        "ElasticConfig(hang_timeout_s=...)"
        if silent
        else "timeout_s (of training functions, ElasticConfig(hang_timeout_s=...))"
    )
    advice = f"If the set-up only needs more time, increase {limit}."
    why = "raysgd did not try again, because a second attempt would take as long."
    return errors.WorkerStartError("\n".join([*stories, f"{advice} {why}"]))


def no_room_error(
    group: WorkerGroupProtocol, missing: int, target: int, limit_s: float, *, no_room: bool = True
) -> errors.ResourceError:
    """The error about workers that were not up in time, for lack of room or too slow."""
    if not no_room:
        late = f"{missing} of {errors.counted(target, 'worker process', 'worker processes')} did not start within {limit_s:g} s"
        return errors.ResourceError(
            f"{late}, although the cluster had room. The usual cause is a machine that is overloaded or short of memory. End other "
            f"programs, ask for fewer workers, or set the environment variable {START_LIMIT} to a longer limit in seconds"
        )
    had = f"the cluster had no room for {missing} of {errors.counted(target, 'worker')} within {limit_s:g} s"
    room = group.room()
    return errors.ResourceError(f"{had}: {_sizes(room, missing)}. {_advice(room)}")


def _advice(room: Room) -> str:
    if room.capacity > 0:
        return MORE_ROOM
    return (
        "No machine is large enough for one such worker. Ask for smaller ones (num_cpus_per_worker, resources_per_worker; "
        "use_gpu=False if no machine has a GPU), or add nodes"
    )


def check_can_fit(group: WorkerGroupProtocol, count: int) -> None:
    """Raise an error at once if even an empty cluster could never hold so many workers."""
    room = group.room()
    if room.capacity >= count or room.grows:
        return
    raise errors.ResourceError(
        f"the cluster can never hold {errors.counted(count, 'worker')}: {_sizes(room, count)}. This script started the cluster, so nothing "
        f"adds nodes to it by itself. {_advice(room)}. If you are about to add nodes, set the environment variable {START_LIMIT} to how "
        "many seconds to wait for them"
    )


def _sizes(room: Room, count: int) -> str:
    needed = f"{errors.counted(count, 'worker needs', 'workers need')} {room.demand(count)}"
    return f"{needed}, and an empty cluster could hold {errors.counted(room.capacity, 'such worker')}"


def held_error(room: Room, count: int, holders: Mapping[Any, str]) -> errors.ResourceError:
    """The error about workers whose resources other trainers of this process hold. `holders` has
    the engines of these, with a description."""
    session = vars(sys.modules["__main__"])
    wanted = errors.counted(count, "worker, which needs", "workers, which need")
    lines = [f"the cluster has no room for {wanted} {room.demand(count)}."]
    ways = []
    for engine, size in holders.items():
        names = [name for name, value in session.items() if getattr(value, "_engine", None) is engine]
        lines.append(
            f"An earlier trainer of this process{f' ({names[0]})' if names else ''} holds the resources of {size}."
        )
        ways += [f"{name}.shutdown()" for name in names[:1]]
    lines.append(
        f"It does not end by itself: call {' and '.join([*ways, 'raysgd.shutdown_all()'][: max(len(ways), 1)])} and try again"
        f"{', or raysgd.shutdown_all(), which ends all trainers of this process' if ways else ''}. "
        "`with TorchTrainer(...) as trainer:` ends a trainer by itself"
    )
    return errors.ResourceError(" ".join(lines))


def warn_no_room(group: WorkerGroupProtocol, missing: int, waited_s: float, limit_s: float) -> bool:
    """Log what workers wait for, unless the wait has only begun. Return whether it did."""
    if waited_s < QUIET_S:
        return False
    waiting = errors.counted(missing, "worker is", "workers are")
    logger.warning("%s waiting for %s, for at most %.0f s", waiting, group.room().demand(missing), limit_s)
    return True


def out_of_step_error(detail: str, at: Progress) -> errors.OutOfStepError:
    """The error about ranks that did not make the same collective calls."""
    return errors.OutOfStepError(
        f"the ranks are out of step in epoch {at.epoch}, batch {at.batches + 1}: {detail}. Gradients and other sums may be wrong since "
        "then. raysgd did not retry the call. Most likely some ranks make a collective call (all_reduce, barrier, broadcast, "
        "all_gather, ...) that others do not make, for example under `if rank == 0:`, or make it in a different order or with tensors "
        "of a different size. Let every rank make the same calls in the same order, and load the newest checkpoint"
    )


def failed_error(
    why: str, recoveries: list[Recovery], kind: type[errors.TrainingFailedError] = errors.TrainingFailedError
) -> errors.TrainingFailedError:
    """The error about a call that raysgd gave up, with each of its recoveries."""
    lines = [f"training failed: {why}."]
    for recovery in recoveries:
        ranks = ", ".join(map(str, recovery.removed_ranks)) or "none"
        where = f" in epoch {recovery.epoch}, batch {recovery.batch}" if recovery.epoch else ""
        lines.append(
            f"  {recovery.reason}{where}, ranks that failed or left: {ranks}"
            f" ({recovery.world_size_before} -> {errors.counted(recovery.world_size_after, 'worker')}): {recovery.detail}"
        )
    if any(recovery.reason == DATA_LOADER for recovery in recoveries):
        lines.append(LOADER_HINT)
    lines.append(
        "Look for the cause at the lines above, and in the batch. If the code only needs more time, raise the limit: "
        "elastic=ElasticConfig(hang_timeout_s=...)."
        if kind is errors.HangError
        else "If you expect such failures, pass train() a larger max_retries (-1 for no limit). If it is the same batch each "
        "time, look for the cause in that batch or in the code."
    )
    return kind("\n".join(lines))


def cut_short_error(ranks: Sequence[int]) -> errors.TrainingFailedError:
    """The error about the user's function that has run in part, without a snapshot."""
    return errors.TrainingFailedError(
        f"another rank failed while the function was in a collective call on {errors.ranked(ranks)}. The function has ended on no rank. "
        "raysgd does not call it again, because that could repeat what it has done. There is no snapshot of the state before the call, so "
        "training continues with the state of the first of these ranks. To undo what the function changed, load() a checkpoint. To let "
        "raysgd go back to a snapshot and call it again, pass ElasticConfig(snapshot_every=...) with another value than None"
    )


def older_state_error(call: str, wanted: Progress, newest: Progress) -> errors.CheckpointError:
    """The error of a call that needs a state which no worker has any more."""
    return errors.CheckpointError(
        f"all workers failed during {call!r}, which needs their state of epoch {wanted.epoch}, batch {wanted.batches}. New "
        f"workers continue from the newest snapshot (epoch {newest.epoch}, batch {newest.batches}), which lacks what happened since. "
        "So nothing was saved, and an older file of that name is unchanged. Train again from here, and save then"
    )

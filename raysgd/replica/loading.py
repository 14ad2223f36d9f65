"""Load a checkpoint on all ranks. Worker.

Each rank reads the state and checks it, before any of them changes anything. What a check cannot
foresee (a user's own `load_state_dict`) can still fail on one rank: then the state of all ranks is
undefined. A rank whose state is undefined has none that others could take.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from raysgd.errors import CheckpointError
from raysgd.replica.replica_base import ReplicaBase
from raysgd.replica.steps.position import align_position
from raysgd.storage.seen import UnseenError

T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """Why a rank does not load a checkpoint. It is returned like a result, so that the generation
    continues. With `unseen`, the rank does not see the file, and the driver has to send it. Without
    a reason, another rank has refused."""

    why: str = ""
    trace: str = ""
    unseen: bool = False


def restore(replica: ReplicaBase, source: Any, trusted: bool, loads: int | None) -> Any:
    """Load a checkpoint from a file that this rank may see, or from bytes that were sent to it.
    `loads` counts the user's loads; it is the same on each rank that has loaded this one. None: the
    state is this trainer's own, and so are the calls that it counts."""
    return take_over(replica, lambda: replica.read(source, trusted=trusted), loads)


def load_again(
    replica: ReplicaBase,
    method: Callable[..., Any],
    arguments: dict[str, Any],
    workers: int,
    loads: int | None,
    unsaved: Any,
) -> Refusal | None:
    """Load, in new processes, what this trainer has saved or loaded when it had so many workers."""
    answer = method(replica, **arguments, loads=loads)
    if isinstance(answer, Refusal):
        return answer
    replica.load_unsaved(unsaved)
    if workers != replica.operator.world_size:
        replica.operator.resized(workers, replica.operator.world_size)
    return None


def take_over(replica: ReplicaBase, read: Callable[[], dict[str, Any]], loads: int | None) -> Any:
    """Load the checkpoint that `read` returns. Return a `Refusal`, or what a checkpoint does not
    have of the state. If a worker fails while the ranks change their state, the driver repeats the
    load."""

    def checked() -> dict[str, Any]:
        state = read()
        replica.check(state)
        return align_position(state)

    state, refusal = agreed(replica, checked)
    if state is None or refusal is not None:
        return refusal
    replica.undefined = True
    _, refusal = agreed(replica, lambda: replica.adopt(state))
    if refusal is None:
        replica.undefined = False
        replica.end_load(loads)
    return refusal or replica.unsaved()


def agreed(replica: ReplicaBase, part: Callable[[], T]) -> tuple[T | None, Refusal | None]:
    """Do a part of a load on all ranks. Return what it returned, and, if it failed on any rank, why
    this one refuses."""
    value, refusal = None, None
    try:
        value = part()
    except Exception as error:
        refusal = refusal_of(error)
    if not replica.all_succeeded(refusal is None) and refusal is None:
        refusal = Refusal()
    return value, refusal


def refusal_of(error: Exception) -> Refusal:
    trace = traceback.format_exc()
    if isinstance(error, UnseenError):
        return Refusal("it does not see the file", trace, unseen=True)
    if isinstance(error, CheckpointError):
        return Refusal(str(error), trace)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"in {place.name}, {os.path.basename(place.filename)}:{place.lineno}"
    return Refusal(f"the state could not be loaded: {type(error).__name__}: {error} ({where})", trace)

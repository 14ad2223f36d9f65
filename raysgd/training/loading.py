"""Load a checkpoint on all ranks or on none. Worker.

Each rank reads the state and checks it, before any of them changes anything. What a check cannot
foresee (a user's own `load_state_dict`) can still fail on one rank: then all ranks go back to the
state from before. Meanwhile a rank says that it has no state that others could take, so that no
state that is half loaded survives a failure.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.errors import CheckpointError, described
from raysgd.storage.seen import UnseenError
from raysgd.training.position import at_its_epoch

if TYPE_CHECKING:
    from raysgd.training.replica_base import ReplicaBase

logger = logging.getLogger("raysgd")

HALF_LOADED = (
    "the state from before a load that failed could not be restored, so this worker has a part of each: load a checkpoint, or "
    "create a new trainer"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """Why a rank does not load a checkpoint. It is returned like a result, so that the generation
    continues. With `unseen`, the rank does not see the file, and the driver has to send it. Without
    a reason, another rank has refused."""

    why: str = ""
    trace: str = ""
    unseen: bool = False


def restore(replica: ReplicaBase, source: Any, trusted: bool, loads: int) -> Refusal | None:
    """Load a checkpoint from a file that this rank may see, or from bytes that were sent to it.
    `loads` counts the user's loads; it is the same on each rank that has loaded this one."""
    return take_over(replica, lambda: replica.read(source, trusted=trusted), loads)


def take_over(replica: ReplicaBase, read: Callable[[], dict[str, Any]], loads: int) -> Refusal | None:
    """Load the checkpoint that `read` returns."""

    def checked() -> dict[str, Any]:
        state = read()
        replica.check(state)
        return at_its_epoch(state)

    state, refusal = agreed(replica, checked)
    if state is None or refusal is not None:
        return refusal
    go_back = replica.way_back()
    replica.half_loaded = True
    try:
        _, refusal = agreed(replica, lambda: replica.adopt(state))
    except BaseException:  # another rank has failed, or the user has pressed Ctrl-C, and that counts
        try:
            _go(replica, go_back)
        except Exception as error:
            logger.warning("%s (%s)", HALF_LOADED, described(error))
        raise
    if refusal is not None:
        try:
            _go(replica, go_back)
        except Exception as error:
            why = f"{refusal.why or 'another rank has refused the state'}. Then {HALF_LOADED} ({described(error)})"
            raise CheckpointError(why) from error
        return refusal
    replica.complete_load(state)
    replica.half_loaded = False
    replica.end_load(loads)
    return None


def _go(replica: ReplicaBase, go_back: Callable[[], None]) -> None:
    go_back()
    replica.half_loaded = False


def agreed(replica: ReplicaBase, part: Callable[[], T]) -> tuple[T | None, Refusal | None]:
    """Do a part of a load on all ranks. Return what it returned, and, if it failed on any rank, why
    this one refuses."""
    value, refusal = None, None
    try:
        value = part()
    except Exception as error:
        refusal = _refusal(error)
    if not replica.all_succeeded(refusal is None) and refusal is None:
        refusal = Refusal()
    return value, refusal


def _refusal(error: Exception) -> Refusal:
    trace = traceback.format_exc()
    if isinstance(error, UnseenError):
        return Refusal("it does not see the file", trace, unseen=True)
    if isinstance(error, CheckpointError):
        return Refusal(str(error), trace)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"in {place.name}, {os.path.basename(place.filename)}:{place.lineno}"
    return Refusal(f"the state could not be loaded: {type(error).__name__}: {error} ({where})", trace)

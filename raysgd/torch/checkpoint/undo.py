"""Load a state on all ranks or on none: undo the load on all ranks if it fails on one of them. Worker."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raysgd.errors import CheckpointError
from raysgd.torch import foreign
from raysgd.torch.checkpoint import states
from raysgd.torch.checkpoint.files import UnseenError
from raysgd.torch.data.sampling import is_planned, random_sources

if TYPE_CHECKING:
    from raysgd.torch.replica import TorchReplica

__all__ = ["on_all_ranks", "undone_unless_all_succeed"]

# Attributes of a replica that a load replaces with other objects, and does not change in place.
REPLACED = ("_sources", "_feed", "_validation_began")
UNSEEN = "the file cannot be seen"


@contextmanager
def on_all_ranks(ranks: int) -> Iterator[None]:
    """If this block fails on any rank, raise CheckpointError (or UnseenError) on all ranks. All ranks must enter it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    reasons: list[Any] = [None if error is None else _reason(error)]
    if ranks > 1:
        mine, reasons = reasons[0], [None] * ranks
        dist.all_gather_object(reasons, mine)
    if UNSEEN in reasons:
        raise UnseenError from error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(
                f"{f'rank {rank}: ' if ranks > 1 else ''}{reason}. Nothing was changed on any rank"
            ) from error


@contextmanager
def undone_unless_all_succeed(replica: TorchReplica, *, models: bool) -> Iterator[None]:
    """Undo the load in this block if it fails on any rank. Then raise CheckpointError on all ranks. Meanwhile, keep a copy
    of what the block changes: of the models only if it loads them, and not of an optimizer's tensors, because loading
    replaces them."""
    undo = _steps_to_undo(replica, models=models)
    try:
        with on_all_ranks(replica.operator.world_size):
            yield
    except BaseException:
        try:
            undo.close()
        except Exception as error:
            raise CheckpointError(
                f"a load failed, and what it had changed could not be restored ({type(error).__name__}: {error}): create a new "
                "trainer, and load a checkpoint into it"
            ) from error
        raise


def _steps_to_undo(replica: TorchReplica, *, models: bool) -> ExitStack:
    """Return the steps that restore the present state: the last one first, and also those after one that fails."""
    operator, steps = replica.operator, ExitStack()
    parts, precision = operator._parts, operator._precision

    def keep(thing: Any) -> None:
        kept = states.copied(thing.state_dict())
        if kept is not None:
            steps.callback(thing.load_state_dict, kept)
        if hasattr(thing, "__dict__"):
            steps.callback(_refill, vars(thing), dict(vars(thing)))

    steps.callback(
        states.restore_random, states.random_state()
    )  # last, because a user's load_state_dict may draw numbers
    steps.callback(vars(replica).update, {name: getattr(replica, name) for name in REPLACED})
    for position in (replica._position, replica._val_position, replica._tested):
        steps.callback(position.adopt, position.as_dict())
    if is_planned(parts.train_loader):
        for source in random_sources(parts.train_loader):
            steps.callback(source.set_state, source.get_state())
    keep(operator)
    steps.callback(_refill, vars(parts.averages), dict(vars(parts.averages)))
    scaler = states.copied(precision.state())
    if scaler:
        steps.callback(precision.load, scaler)
    for scheduler in parts.schedulers:
        keep(scheduler)
    for optimizer in parts.optimizers:
        if getattr(type(optimizer), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict:
            for group in optimizer.param_groups:
                steps.callback(_refill, group, dict(group))
            steps.callback(_refill, vars(optimizer), dict(vars(optimizer)))
        else:
            keep(optimizer)
    for model in parts.models if models else ():
        steps.callback(model.load_state_dict, _kept_model(model.state_dict()))
    return steps


def _refill(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)


def _reason(error: Exception) -> str:
    if isinstance(error, UnseenError):
        return UNSEEN
    if isinstance(error, CheckpointError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"in {place.name}, {os.path.basename(place.filename)}:{place.lineno}"
    return f"the state could not be loaded: {type(error).__name__}: {error} ({where})"


def _kept_model(state: Any) -> dict[str, Any]:
    """Return a copy in main memory; of sharded tensors, this rank's shards on their device."""
    kept = {
        name: value.detach().clone() if hasattr(value, "full_tensor") else states.copied(value)
        for name, value in state.items()
    }
    return foreign.with_module_versions(kept, state)

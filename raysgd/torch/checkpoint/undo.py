"""Undo a load on all ranks if it fails on one of them. Worker."""

from __future__ import annotations

import functools
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from raysgd.errors import CheckpointError
from raysgd.torch import foreign
from raysgd.torch.checkpoint import states
from raysgd.torch.checkpoint.files import UnseenError
from raysgd.torch.data.sampling import is_planned, random_sources
from raysgd.torch.operator import TrainingOperator
from raysgd.training.position import Position

__all__ = ["Undo"]

Step = Callable[[], Any]
# Attributes of a replica that a load replaces with other objects, and does not change in place.
REPLACED = ("_train", "_feed", "_validation_began")
UNSEEN = "the file cannot be seen"


class LoadingReplica(Protocol):
    """What this module needs from a replica, in addition to the attributes in `REPLACED`."""

    operator: TrainingOperator
    _position: Position
    _val_position: Position


class Undo:
    """Owns what a load replaces: a copy of the models and of the small parts of a replica's state. An optimizer's tensors
    are kept without a copy, because loading replaces them."""

    def __init__(self, replica: LoadingReplica) -> None:
        operator = replica.operator
        parts, precision = operator._parts, operator._precision
        self._ranks = operator.world_size
        self._steps: list[Step] = []
        for model in parts.models:
            self._steps.append(functools.partial(model.load_state_dict, _kept_model(model.state_dict())))
        for optimizer in parts.optimizers:
            self._steps += _optimizer_steps(optimizer)
        for scheduler in parts.schedulers:
            self._steps += [_attributes(scheduler), _state_dict(scheduler)]
        self._steps.append(_attributes(parts.averages))
        scaler = states.copied(precision.state())
        if scaler:
            self._steps.append(functools.partial(precision.load, scaler))
        self._steps += [_attributes(operator), _state_dict(operator)]
        if is_planned(parts.train_loader):
            for source in random_sources(parts.train_loader):
                self._steps.append(functools.partial(source.set_state, source.get_state()))
        for position in (replica._position, replica._val_position):
            self._steps.append(functools.partial(position.adopt, position.as_dict()))
        self._steps.append(functools.partial(vars(replica).update, {name: getattr(replica, name) for name in REPLACED}))
        self._steps.append(functools.partial(states.restore_random, states.random_state()))

    @contextmanager
    def unless_all_succeed(self) -> Iterator[None]:
        """Undo the load in this block if it fails on any rank. Then raise CheckpointError (or UnseenError) on all ranks. All
        ranks must enter the block."""
        error: Exception | None = None
        try:
            try:
                yield
            except Exception as caught:
                error = caught
            _raise_if_any_failed(error, ranks=self._ranks)
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Carry out all steps, also those after one that fails."""
        failed: Exception | None = None
        for step in self._steps:
            try:
                step()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise CheckpointError(
                f"a load failed, and what it had changed could not be restored ({type(failed).__name__}: {failed}): create a "
                "new trainer, and load a checkpoint into it"
            ) from failed


def _raise_if_any_failed(error: Exception | None, *, ranks: int) -> None:
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


def _reason(error: Exception) -> str:
    if isinstance(error, UnseenError):
        return UNSEEN
    if isinstance(error, CheckpointError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"in {place.name}, {os.path.basename(place.filename)}:{place.lineno}"
    return f"the state could not be loaded: {type(error).__name__}: {error} ({where})"


def _kept_model(state: Any) -> OrderedDict[str, Any]:
    """Return a copy in main memory; of sharded tensors, this rank's shards on their device."""
    kept: Any = OrderedDict(
        (name, value.detach().clone() if hasattr(value, "full_tensor") else states.copied(value))
        for name, value in state.items()
    )
    foreign.copy_module_versions(state, kept)
    return kept  # type: ignore[no-any-return]


def _attributes(thing: Any) -> Step:
    """Return a step that restores the present attributes of an object, whose values are not copied."""
    kept = dict(getattr(thing, "__dict__", {}))

    def restore() -> None:
        if kept:
            vars(thing).clear()
            vars(thing).update(kept)

    return restore


def _state_dict(thing: Any) -> Step:
    """Return a step that restores the present state of an object."""
    kept = states.copied(thing.state_dict())
    return lambda: None if kept is None else thing.load_state_dict(kept)


def _optimizer_steps(optimizer: Any) -> list[Step]:
    ordinary = isinstance(optimizer, torch.optim.Optimizer)
    if not ordinary or type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return [_attributes(optimizer), _state_dict(optimizer)]
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore_groups() -> None:
        for group, kept in groups:
            group.clear()
            group.update(kept)

    return [_attributes(optimizer), restore_groups]

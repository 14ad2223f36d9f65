"""What a load replaces, kept until every rank has taken the new state: a load that fails on one rank changes none."""

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
from raysgd.torch.checkpoint import states
from raysgd.torch.checkpoint.files import UnseenError
from raysgd.torch.data.sampling import is_planned, random_sources
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.snapshots import copied
from raysgd.training.position import Position

__all__ = ["Undo"]

Step = Callable[[], Any]


class Taker(Protocol):
    """What is asked of the replica. `_train`, `_feed` and `_validation_began` are exchanged by a load, not changed."""

    operator: TrainingOperator
    _position: Position
    _val_position: Position


UNSEEN = "the file is not to be seen"
EXCHANGED = ("_train", "_feed", "_validation_began")


class Undo:
    """Owns a copy of the models and of the small parts of a replica's state. An optimizer's tensors are kept, not copied:
    loading replaces them."""

    def __init__(self, replica: Taker) -> None:
        operator = replica.operator
        parts, precision = operator._parts, operator._precision
        self._ranks = operator.world_size
        self._steps: list[Step] = []
        for model in parts.models:
            self._steps.append(functools.partial(model.load_state_dict, _kept_model(model.state_dict())))
        for optimizer in parts.optimizers:
            self._steps += _optimizer_steps(optimizer)
        for scheduler in parts.schedulers:
            self._steps += [_attributes(scheduler), _through_state_dict(scheduler)]
        scaler = copied(precision.state())
        if scaler:
            self._steps.append(functools.partial(precision.load, scaler))
        self._steps += [_attributes(operator), _through_state_dict(operator)]
        if is_planned(parts.train_loader):
            for source in random_sources(parts.train_loader):
                self._steps.append(functools.partial(source.set_state, source.get_state()))
        for position in (replica._position, replica._val_position):
            self._steps.append(functools.partial(position.adopt, position.as_dict()))
        kept = {name: getattr(replica, name) for name in EXCHANGED}
        self._steps.append(lambda: vars(replica).update(kept))
        self._steps.append(functools.partial(states.restore_random, states.random_state()))

    @contextmanager
    def unless_all_succeed(self) -> Iterator[None]:
        """Put everything back when what is done in here fails, on this rank or on another one; raise CheckpointError (or
        UnseenError) then, on all ranks alike. All ranks must come by."""
        error: Exception | None = None
        try:
            try:
                yield
            except Exception as caught:
                error = caught
            _raise_if_any_failed(error, ranks=self._ranks)
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """One part that fails does not keep the others from it."""
        failed: Exception | None = None
        for step in self._steps:
            try:
                step()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise CheckpointError(
                f"a load failed, and what it had changed could not be put back ({type(failed).__name__}: {failed}): make a "
                "new trainer, and load a checkpoint into it"
            ) from failed


def _raise_if_any_failed(error: Exception | None, *, ranks: int) -> None:
    said: list[Any] = [None if error is None else _said(error)]
    if ranks > 1:
        mine, said = said[0], [None] * ranks
        dist.all_gather_object(said, mine)
    failed = [rank for rank, text in enumerate(said) if text is not None]
    if any(said[rank] == UNSEEN for rank in failed):
        raise UnseenError from error
    if failed:
        where = f"rank {failed[0]}: " if ranks > 1 else ""
        raise CheckpointError(f"{where}{said[failed[0]]}. Nothing was changed") from error


def _said(error: Exception) -> str:
    if isinstance(error, UnseenError):
        return UNSEEN
    if isinstance(error, CheckpointError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"in {place.name}, {os.path.basename(place.filename)}:{place.lineno}"
    return f"the state could not be taken: {type(error).__name__}: {error} ({where})"


def _kept_model(state: Any) -> OrderedDict[str, Any]:
    """A copy in main memory; of sharded tensors, this rank's shards where they are."""
    kept: Any = OrderedDict(
        (name, value.detach().clone() if hasattr(value, "full_tensor") else copied(value))
        for name, value in state.items()
    )
    if hasattr(state, "_metadata"):
        kept._metadata = state._metadata
    return kept  # type: ignore[no-any-return]


def _attributes(thing: Any) -> Step:
    """The attributes of an object as they are now, without copies of their values."""
    kept = dict(getattr(thing, "__dict__", {}))

    def put_back() -> None:
        if kept:
            vars(thing).clear()
            vars(thing).update(kept)

    return put_back


def _through_state_dict(thing: Any) -> Step:
    kept = copied(thing.state_dict())

    def put_back() -> None:
        if kept is not None:
            thing.load_state_dict(kept)

    return put_back


def _optimizer_steps(optimizer: Any) -> list[Step]:
    ordinary = isinstance(optimizer, torch.optim.Optimizer)
    if not ordinary or type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return [_attributes(optimizer), _through_state_dict(optimizer)]
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def put_groups_back() -> None:
        for group, kept in groups:
            group.clear()
            group.update(kept)

    return [_attributes(optimizer), put_groups_back]

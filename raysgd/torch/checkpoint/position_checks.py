"""Check a checkpoint's counters, its position in the data and its random states before they are loaded. Worker."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sized
from dataclasses import fields
from typing import Any

import numpy
import torch

from raysgd.errors import CheckpointError
from raysgd.torch.checkpoint.states import set_random
from raysgd.torch.data.sampling import has_own_batches, is_planned, random_sources
from raysgd.torch.operator import TrainingOperator
from raysgd.training.position import Position

__all__ = ["check_counters", "check_loader", "check_random"]

LARGEST = 1 << 62


def check_counters(state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the counters are integers that are consistent with each other."""
    for name, least in {"global_step": 0, "epoch": 0, "world_size": 1}.items():
        if name in state:
            _check_count(name, state[name], least)
    for name in ("position", "validation_position", "validation_began"):
        if state.get(name) is not None:
            _check_position(name, state[name])
    position = state.get("position") or {}
    if position and "epoch" in state and position.get("epoch", 0) != state["epoch"]:
        raise CheckpointError(f"its epoch is {state['epoch']}, but its position is in epoch {position.get('epoch', 0)}")


def _check_count(name: str, value: Any, least: int = 0) -> None:
    if type(value) is not int or not least <= value < LARGEST:
        raise CheckpointError(f"{name} is {value!r:.60}, and must be an integer of at least {least}")


def _check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise CheckpointError(f"{name} is {value!r:.60}, and must be True or False")


def _check_position(name: str, position: Any) -> None:
    if not isinstance(position, Mapping) or not all(isinstance(key, str) for key in position):
        raise CheckpointError(f"{name} is a {type(position).__name__}, and must be a dictionary of counters")
    for field in fields(Position):
        value, where = position.get(field.name, field.default), f"{name}[{field.name!r}]"
        if isinstance(field.default, bool):
            _check_flag(where, value)
        elif field.name != "parked":
            _check_count(where, value, -1 if field.name == "call" else 0)
        elif value is not None:
            _check_parked(where, value)
    if not position.get("ended", True) and position.get("epoch", 0) == 0:
        raise CheckpointError(f"{name} is in the middle of an epoch, but no epoch has begun")


def _check_parked(where: str, value: Any) -> None:
    """Check the epoch's offset, whether it has ended, and (not in older files) the position in a stream."""
    if not isinstance(value, (list, tuple)) or len(value) not in (2, 3):
        raise CheckpointError(f"{where} must be None or a list of two or three values")
    _check_count(f"{where}[0]", value[0])
    _check_flag(f"{where}[1]", value[1])
    if value[2:] and value[2] is not None:
        _check_count(f"{where}[2]", value[2])


def check_loader(operator: TrainingOperator, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the registered train_loader can continue the checkpoint's epoch."""
    saved = state.get("loader")
    if saved is None:
        return
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"loader is a {type(saved).__name__}, and must be a dictionary")
    order, generators, number = saved.get("order"), saved.get("generators") or (), saved.get("number")
    listed = isinstance(generators, (list, tuple)) and all(_is_vector(each, torch.uint8) for each in generators)
    if not listed or not (order is None or isinstance(order, list) or _is_vector(order, torch.int64)):
        raise CheckpointError("loader: its order of samples, or the state of a generator, has the wrong type")
    if number is not None:
        if not isinstance(number, (list, tuple)) or len(number) != 2:
            raise CheckpointError("loader: the number of its pass must be a list of two integers")
        for each in number:
            _check_count("loader['number']", each, -1)
    loader = operator._parts.train_loader
    if loader is not None and is_planned(loader):
        for source, generator in zip(random_sources(loader), generators, strict=False):
            try:
                torch.Generator(source.device).set_state(generator)
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(f"loader: the state of a generator is damaged ({error})") from error
        position = state.get("position") or {}
        parked = position.get("parked")
        ended = position.get("ended", True) if parked is None else parked[1]
        if not ended and order is not None and len(order):
            _check_order(loader, order)


def _is_vector(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() == 1


def _check_order(loader: Any, order: Any) -> None:
    """Check the order of an epoch that has not ended: all its samples must be in the registered loader's data set."""
    batches = isinstance(order, list) and all(isinstance(each, list) for each in order)
    if batches != has_own_batches(loader):
        raise CheckpointError(
            "it is in the middle of an epoch whose batches were chosen in another way (by a batch sampler, or by a batch "
            "size) than those of the registered train_loader"
        )
    units = [each for batch in order for each in batch] if batches else order
    if isinstance(units, list):
        types = {type(each) for each in units}
        if int not in types:
            return  # samples with keys of another type
        if types != {int} or not all(order):
            raise CheckpointError("loader: its order of samples must contain only integers")
    if isinstance(loader.dataset, Sized):
        least, most = (units.min(), units.max()) if isinstance(units, torch.Tensor) else (min(units), max(units))
        size, first, last = len(loader.dataset), int(least), int(most)
        if first < -size or last >= size:
            raise CheckpointError(
                f"it is in the middle of an epoch with sample {last}, but the registered train_loader has {size} samples"
            )


def check_random(state: dict[str, Any]) -> None:
    """Raise CheckpointError unless each rank's random states can be set, which is tried on new generators."""
    ranks = state.get("rng")
    if ranks is None:
        return
    if not isinstance(ranks, (list, tuple)) or not all(isinstance(each, Mapping) for each in ranks):
        raise CheckpointError("rng must be a list with the random states of each rank")
    for rank, saved in enumerate(ranks):
        try:
            _try_random(saved)
        except Exception as error:
            raise CheckpointError(
                f"the random states of rank {rank} are damaged ({type(error).__name__}: {error})"
            ) from error


def _try_random(saved: Mapping[str, Any]) -> None:
    gauss = saved["python"][2]
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError(f"Python's next normal value is {gauss!r:.40}")
    if "numpy" in saved:
        _, keys, position, has_gauss, cached = saved["numpy"]
        if not _is_vector(keys, torch.int64) or int(keys.min()) < 0 or int(keys.max()) >= 1 << 32:
            raise TypeError("NumPy's keys are not 32-bit integers")
        if type(has_gauss) is not int or not isinstance(cached, float) or type(position) is not int:
            raise TypeError("NumPy's position is not a number")
    set_random(saved, random.Random(), torch.Generator(), numpy.random.RandomState())
    if "cuda" in saved:
        if not _is_vector(saved["cuda"], torch.uint8):
            raise TypeError("CUDA's state is not a tensor of bytes")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(saved["cuda"])

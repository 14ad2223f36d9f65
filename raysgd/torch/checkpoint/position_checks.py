"""Whether a checkpoint's counters, its place in the data and its random states can be taken."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sized
from dataclasses import fields
from typing import Any

import torch

from raysgd.errors import CheckpointError
from raysgd.torch.checkpoint.states import numpy_or_none
from raysgd.torch.data.sampling import has_own_batches, is_planned, random_sources
from raysgd.torch.operator import TrainingOperator
from raysgd.training.position import Position

__all__ = ["check_counters", "check_loader", "check_random"]

LARGEST = 1 << 62
PLACES = ("position", "validation_position", "validation_began")


def check_counters(state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the counters are whole numbers that go together."""
    for name, least in {"global_step": 0, "epoch": 0, "world_size": 1}.items():
        if name in state:
            _check_count(name, state[name], least)
    for name in PLACES:
        if state.get(name) is not None:
            _check_place(name, state[name])
    place = state.get("position") or {}
    if place and "epoch" in state and place.get("epoch", 0) != state["epoch"]:
        raise CheckpointError(f"its epoch is {state['epoch']}, and its position is in epoch {place.get('epoch', 0)}")


def _check_count(name: str, value: Any, least: int = 0) -> None:
    if type(value) is not int or not least <= value < LARGEST:
        raise CheckpointError(f"{name} is {value!r:.60}, and must be a whole number, {least} or more")


def _check_place(name: str, place: Any) -> None:
    if not isinstance(place, Mapping) or not all(isinstance(key, str) for key in place):
        raise CheckpointError(f"{name} is a {type(place).__name__}, and must be a dictionary of counters")
    for field in fields(Position):
        value = place.get(field.name, field.default)
        where = f"{name}[{field.name!r}]"
        if isinstance(field.default, bool):
            _check_flag(where, value)
        elif field.name == "parked":
            _check_parked(where, value)
        else:
            _check_count(where, value, -1 if field.name == "call" else 0)
    if not place.get("ended", True) and place.get("epoch", 0) == 0:
        raise CheckpointError(f"{name} is in the middle of an epoch, and no epoch has begun")


def _check_flag(where: str, value: Any) -> None:
    if type(value) is not bool:
        raise CheckpointError(f"{where} is {value!r:.60}, and must be True or False")


def _check_parked(where: str, value: Any) -> None:
    """The epoch's offset, whether it has ended, and (not in older files) the place in a stream."""
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or len(value) not in (2, 3):
        raise CheckpointError(f"{where} must be None or a list of two or three values")
    _check_count(f"{where}[0]", value[0])
    _check_flag(f"{where}[1]", value[1])
    if value[2:] and value[2] is not None:
        _check_count(f"{where}[2]", value[2])


def check_loader(operator: TrainingOperator, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the rest of the epoch can be taken from the loader that is registered here."""
    place = state.get("loader")
    if place is None:
        return
    if not isinstance(place, Mapping):
        raise CheckpointError(f"loader is a {type(place).__name__}, and must be a dictionary")
    order, generators, number = place.get("order"), place.get("generators") or (), place.get("number")
    listed = isinstance(generators, (list, tuple)) and all(_is_bytes(each) for each in generators)
    if not listed or not (order is None or isinstance(order, list) or _is_order(order)):
        raise CheckpointError("loader: its order of samples, or the state of a generator, is of another type")
    if number is not None:
        if not isinstance(number, (list, tuple)) or len(number) != 2:
            raise CheckpointError("loader: the number of its pass is of another type")
        for each in number:
            _check_count("loader['number']", each, -1)
    loader = operator._parts.train_loader
    if loader is not None and is_planned(loader):
        _check_generators(loader, generators)
        if _in_epoch(state):
            _check_order(loader, order)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _is_order(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1


def _in_epoch(state: dict[str, Any]) -> bool:
    place = state.get("position") or {}
    parked = place.get("parked")
    return not (place.get("ended", True) if parked is None else parked[1])


def _check_generators(loader: Any, saved: Any) -> None:
    for mine, there in zip(random_sources(loader), saved, strict=False):
        try:
            torch.Generator(mine.device).set_state(there)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"loader: the state of a generator is damaged ({error})") from error


def _check_order(loader: Any, order: Any) -> None:
    """Of an epoch that is not over: samples that are here."""
    if order is None or not len(order):
        return
    batches = isinstance(order, list) and all(isinstance(each, list) for each in order)
    if batches != has_own_batches(loader):
        raise CheckpointError(
            "it is in the middle of an epoch whose batches were chosen in another way (a batch sampler, or a batch size) "
            "than those of the train_loader here"
        )
    units = [each for batch in order for each in batch] if batches else order
    if isinstance(units, list):
        kinds = {type(each) for each in units}
        if int not in kinds:
            return  # samples with names
        if kinds != {int} or not all(order):
            raise CheckpointError("loader: its order of samples has something else than whole numbers")
    if isinstance(loader.dataset, Sized):
        least, most = (units.min(), units.max()) if isinstance(units, torch.Tensor) else (min(units), max(units))
        size, first, last = len(loader.dataset), int(least), int(most)
        if first < -size or last >= size:
            raise CheckpointError(
                f"it is in the middle of an epoch over samples up to number {last}, and the train_loader here has {size} "
                "samples"
            )


def check_random(state: dict[str, Any]) -> None:
    """Raise CheckpointError unless each rank's random states can be set. They are tried on generators of their own."""
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
    version, internal, gauss = saved["python"]
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError(f"python's next normal number is {gauss!r:.40}")
    random.Random().setstate((version, tuple(internal), gauss))
    torch.Generator().set_state(saved["torch"])
    numpy = numpy_or_none()
    if numpy is not None and "numpy" in saved:
        kind, keys, position, has_gauss, cached = saved["numpy"]
        if keys.dtype != torch.int64 or keys.dim() != 1 or int(keys.min()) < 0 or int(keys.max()) >= 1 << 32:
            raise TypeError("NumPy's keys are no 32-bit numbers")
        if type(has_gauss) is not int or not isinstance(cached, float) or type(position) is not int:
            raise TypeError("NumPy's position is no number")
        numpy.random.RandomState().set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in saved:
        if not _is_bytes(saved["cuda"]):
            raise TypeError("CUDA's state is no tensor of bytes")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(saved["cuda"])

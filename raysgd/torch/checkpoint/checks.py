"""Check that a checkpoint's content fits an operator before any of it is loaded. Worker.

Only loading shows whether a user's own class accepts its state (the operator, an optimizer that is not torch's). If that
fails, `undo` restores what was there before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sized
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy

from raysgd.data.sharded_stream import ShardedStream
from raysgd.errors import CheckpointError
from raysgd.torch import foreign
from raysgd.torch.checkpoint.optimizer_checks import check_optimizer, check_scaler, check_scheduler
from raysgd.torch.checkpoint.states import scaler_of, set_random
from raysgd.torch.data.sampling import has_own_batches, is_planned, random_sources
from raysgd.torch.operator import TrainingOperator
from raysgd.training.position import Position, check_count

__all__ = ["check_fits"]


def check_fits(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool = False) -> None:
    """Raise CheckpointError with the first thing that does not fit. Nothing is changed. A `metadata_only` state has tensors
    without content."""
    try:
        _check_counters(state)
        _check_parts(operator, state, metadata_only=metadata_only)
        _check_loader(operator, state)
        _check_random(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"its content is not what save() writes, and cannot be checked ({type(error).__name__}: {error})"
        ) from error


def _check_parts(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool) -> None:
    parts = operator._parts
    for name in ("models", "optimizers", "schedulers"):
        saved_parts, registered = state.get(name) or [], len(getattr(parts, name))
        if not isinstance(saved_parts, (list, tuple)):
            raise CheckpointError(f"the checkpoint's {name} must be a list, got a {type(saved_parts).__name__}")
        if registered != len(saved_parts):
            raise CheckpointError(
                f"the checkpoint has {len(saved_parts)} {name}, and this operator registers {registered}"
            )
    for number, (model, saved) in enumerate(zip(parts.models, state["models"], strict=True)):
        _check_model(number, model.state_dict(), saved, metadata_only=metadata_only)
    for number, (optimizer, saved) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        check_optimizer(number, optimizer, saved, v1="format" not in state, metadata_only=metadata_only)
    for number, (scheduler, saved) in enumerate(zip(parts.schedulers, state.get("schedulers") or [], strict=True)):
        check_scheduler(number, scheduler, saved)
    if parts.averages.on:
        _check_averages(parts.models, state.get("averages"), metadata_only=metadata_only)
    precision = operator._precision
    scaler = scaler_of(state, precision.key)
    if precision.key and scaler:
        check_scaler(precision.state() or {}, scaler)


def _check_model(number: int, mine: dict[str, Any], saved: Any, *, metadata_only: bool) -> None:
    missing, unknown = (sorted(map(str, each)) for each in (mine.keys() - saved.keys(), saved.keys() - mine.keys()))
    if missing or unknown:
        raise CheckpointError(
            f"model {number} does not fit the checkpoint: missing in the checkpoint {missing[:4] or 'none'}, "
            f"unknown to the model {unknown[:4] or 'none'}"
        )
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            _check_tensor(f"model {number}: {name}", value, saved[name], metadata_only=metadata_only)
        elif isinstance(saved[name], torch.Tensor):
            raise CheckpointError(
                f"model {number}: {name} is a {type(value).__name__} here and a tensor in the checkpoint"
            )
    versions = foreign.module_versions(saved) or {}
    fits = isinstance(versions, Mapping) and all(isinstance(each, Mapping) for each in versions.values())
    if not fits or any(
        type(each.get("version")) not in (int, type(None)) or "assign_to_params_buffers" in each
        for each in versions.values()
    ):
        raise CheckpointError(f"model {number}: the versions of its modules are not what torch writes")


def _check_averages(models: list[Any], saved: Any, *, metadata_only: bool) -> None:
    if saved is None:  # written without the callback EMA
        return
    if not isinstance(saved, list) or len(saved) != len(models) or not all(isinstance(each, Mapping) for each in saved):
        raise CheckpointError(f"the checkpoint's averaged weights are not those of {len(models)} models")
    for number, (model, averages) in enumerate(zip(models, saved, strict=True)):
        mine = dict(model.named_parameters())
        unknown = sorted(map(str, averages.keys() - mine.keys()))
        if unknown:
            raise CheckpointError(f"model {number} has no weights {unknown[:4]}, whose averages the checkpoint has")
        for name, value in averages.items():
            _check_tensor(f"the average of model {number}: {name}", mine[name], value, metadata_only=metadata_only)


def _check_tensor(where: str, mine: torch.Tensor, saved: Any, *, metadata_only: bool) -> None:
    if not isinstance(saved, torch.Tensor):
        raise CheckpointError(f"{where} is a tensor here and a {type(saved).__name__} in the checkpoint")
    if not is_lazy(mine) and mine.shape != saved.shape:
        raise CheckpointError(f"{where} has shape {tuple(mine.shape)} here and {tuple(saved.shape)} in the checkpoint")
    if _kind_of(mine) != _kind_of(saved) or (saved.is_meta and not metadata_only and not mine.is_meta):
        raise CheckpointError(f"{where} is {_shown(mine)} here and {_shown(saved)} in the checkpoint")


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor must have in common with another one that is copied into it. The dtypes' widths can differ."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized, tensor.layout, tensor.is_nested


def _shown(tensor: torch.Tensor) -> str:
    return f"a {tensor.layout} tensor of {tensor.dtype}{' without content' if tensor.is_meta else ''}"


# -- counters and positions ---------------------------------------------------------------------------


def _check_counters(state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the counters are integers that are consistent with each other."""
    for name, least in {"global_step": 0, "epoch": 0, "world_size": 1}.items():
        if name in state:
            check_count(name, state[name], least)
    for name in ("position", "validation_position", "validation_began", "test_position"):
        if state.get(name) is not None:
            Position.check(state[name], name)
    rows = state.get("rows", {})
    kinds = ([int, str], [type(None), str])
    if not isinstance(rows, Mapping) or not all(list(map(type, each)) in kinds for each in rows.values()):
        raise CheckpointError("rows must be a dictionary with a length and a digest for each loader")


# -- the train_loader's order of samples --------------------------------------------------------------


def _check_loader(operator: TrainingOperator, state: dict[str, Any]) -> None:
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
    check_count("loader['epoch']", saved.get("epoch", 0))
    for mark in saved.get("marks", ()):
        parts = mark[1] if isinstance(mark, (list, tuple)) and len(mark) == 2 else None
        if not isinstance(parts, list) or not all(isinstance(part, (list, tuple)) and len(part) == 2 for part in parts):
            raise CheckpointError(
                "loader: its marks must be pairs of a number of batches and a list of each rank's position"
            )
        check_count("loader['marks']", mark[0])
    position = state.get("position") or {}
    parked = position.get("parked")
    at, ended = (position.get("offset", 0), position.get("ended", True)) if parked is None else parked[:2]
    _check_places(operator._parts.train_loader, saved.get("places", []), at=None if ended else at)
    if number is not None:
        if not isinstance(number, (list, tuple)) or len(number) != 2:
            raise CheckpointError("loader: the number of its pass must be a list of two integers")
        for each in number:
            check_count("loader['number']", each, -1)
    loader = operator._parts.train_loader
    if loader is not None and is_planned(loader):
        for source, generator in zip(random_sources(loader), generators, strict=False):
            try:
                torch.Generator(source.device).set_state(generator)
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(f"loader: the state of a generator is damaged ({error})") from error
        if not ended and order is not None and len(order):
            _check_order(loader, order)


def _check_places(loader: Any, places: Any, *, at: int | None) -> None:
    """Check the places in a ShardedStream: offsets, the counts of its shards, and the shards that have ended. The next batch is
    at the offset `at`, or at the beginning of the next epoch (None)."""
    for place in places:
        offset, counts, ended = place
        check_count("loader['places']", offset)
        for count in counts:
            check_count("the number of samples used of a shard", count)
        shards = len(counts)
        for shard in ended:
            check_count("a shard that has ended", shard, 0, shards - 1)
        if isinstance(loader, ShardedStream) and at is not None and shards != loader.num_shards:
            raise CheckpointError(
                f"it was saved with a ShardedStream of {shards} shards, and the registered one has {loader.num_shards}"
            )
    if isinstance(loader, ShardedStream) and at and all(place[0] != at for place in places):
        raise CheckpointError(
            "it was saved in the middle of an epoch on other data than the registered ShardedStream, which cannot continue there"
        )


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


# -- random states ------------------------------------------------------------------------------------


def _check_random(state: dict[str, Any]) -> None:
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

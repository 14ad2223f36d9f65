"""A replica's state as one dictionary, and back: complete, unwrapped, checked before anything is changed."""

from __future__ import annotations

import io
import logging
import pickle
import pickletools
import random
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from raysgd.errors import CheckpointError
from raysgd.torch.base import OperatorBase
from raysgd.torch.files import SeenFile, UnseenError
from raysgd.torch.in_memory import opened
from raysgd.torch.sharded import placed, placed_optimizer

__all__ = ["FORMAT", "check", "dump", "gather", "outline", "parse", "random_state", "read", "restore", "restore_random"]

logger = logging.getLogger(__name__)

FORMAT = "raysgd-torch"
VERSION = 1


def gather(operator: OperatorBase) -> dict[str, Any]:
    """Models (bare), optimizers, schedulers, scaler and the operator's own state; tensors are shared, not copied."""
    parts, precision = operator._parts, operator._precision
    state: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "models": [model.state_dict() for model in parts.models],
        "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
        "operator": operator.state_dict(),  # type: ignore[attr-defined]
        "global_step": operator.global_step,
    }
    if parts.schedulers:
        state["schedulers"] = [scheduler.state_dict() for scheduler in parts.schedulers]
    scaler = precision.state()
    if scaler is not None:
        state[precision.key] = scaler
    return state


def dump(state: dict[str, Any]) -> memoryview:
    """As bytes, without a second copy."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def parse(data: Any, *, trusted: bool) -> dict[str, Any]:
    """Reads bytes; runs no code from them unless they are trusted. Says what is wrong with others."""
    try:
        state = torch.load(opened(data), map_location="cpu", weights_only=not trusted)
    except Exception as error:
        said = re.sub(r"\x1b\[[0-9;]*m", "", (str(error).splitlines() or [type(error).__name__])[0])
        if bytes(data[:2]) != b"PK":  # torch writes zip files
            raise CheckpointError("this is no whole checkpoint: it is not a file as save() writes it") from error
        if not trusted and isinstance(error, pickle.UnpicklingError):
            if not _looks_like_ours(data):
                raise CheckpointError(
                    "this is not a checkpoint of raysgd: it holds no models and optimizers as save() writes them"
                ) from error
            raise CheckpointError(
                "the checkpoint holds Python objects beyond plain values and tensors (usually the operator's own state), "
                "and reading them can run code from the file. If you made the file yourself, pass trusted=True. "
                f"What torch found: {said}"
            ) from error
        raise CheckpointError(f"this is no whole checkpoint: it cannot be read ({said})") from error
    return shaped(state)


def outline(file: SeenFile, *, trusted: bool) -> dict[str, Any] | None:
    """Names and shapes: its tensors stay in the file. None, if it cannot be read in this way: `parse` says why, or reads it."""
    try:
        state = torch.load(file.path, map_location="cpu", weights_only=not trusted, mmap=True)
    except Exception as error:
        logger.debug("%s is not read by the workers: %s", file.path, error)
        return None
    return shaped(state)


def read(file: SeenFile, *, trusted: bool) -> dict[str, Any]:
    """Of a file whose outline was seen to fit; `UnseenError` when it cannot be read here any more."""
    with file.opened() as opened:
        try:
            return shaped(torch.load(opened, map_location="cpu", weights_only=not trusted))
        except Exception as error:
            raise UnseenError(f"{file.path} cannot be read any more ({error})") from error


def _looks_like_ours(data: Any) -> bool:
    """A dictionary that names models and optimizers, as far as one can tell without reading it."""
    try:
        with zipfile.ZipFile(opened(data)) as archive:
            content = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        steps = [(step.name, argument) for step, argument, _ in pickletools.genops(content)]
    except (zipfile.BadZipFile, StopIteration, ValueError):
        return False
    named = {argument for _, argument in steps if isinstance(argument, str)}
    return ("EMPTY_DICT", None) in steps[:2] and {"models", "optimizers"} <= named


def shaped(state: Any) -> dict[str, Any]:
    """Is it one of ours, or of RaySGD v1's? Anything else is foreign."""
    if not isinstance(state, dict) or not isinstance(state.get("models"), list):
        keys = list(state)[:5] if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"this is not a checkpoint of raysgd: it holds {keys}, not models, optimizers and an epoch"
        )
    if not all(isinstance(part, Mapping) for part in [*state["models"], *(state.get("optimizers") or [])]):
        raise CheckpointError("this is not a checkpoint of raysgd: its models or optimizers are no state_dicts")
    if state.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"this checkpoint's format is {state['format']!r}; a TorchTrainer reads {FORMAT!r}")
    if state.get("version", VERSION) > VERSION:
        raise CheckpointError(f"this checkpoint was written by a newer raysgd (format version {state['version']})")
    return state


def check(operator: OperatorBase, state: dict[str, Any]) -> None:
    """Would it fit? Raises, with what does not, before anything is changed."""
    parts = operator._parts
    for name in ("models", "optimizers", "schedulers"):
        mine, theirs = len(getattr(parts, name)), len(state.get(name) or [])
        if mine != theirs:
            raise CheckpointError(f"the checkpoint has {theirs} {name}, and this operator registers {mine}")
    for number, (model, saved) in enumerate(zip(parts.models, state["models"], strict=True)):
        _check_model(number, model.state_dict(), saved)
    for number, (optimizer, saved) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        if "param_groups" in saved:  # an optimizer of the user's own may keep its state in another way
            _check_optimizer(number, optimizer.param_groups, saved["param_groups"])


def _check_optimizer(number: int, mine: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    here, there = ([len(group["params"]) for group in groups] for groups in (mine, saved))
    if here != there:
        raise CheckpointError(
            f"optimizer {number} has parameter groups of {here} tensors here, and {there} in the checkpoint"
        )
    # A newer torch may know more options than the one that saved; options missing on both sides are another optimizer's.
    ours, theirs = ({name for group in groups for name in group} for groups in (mine, saved))
    if ours - theirs and theirs - ours:
        raise CheckpointError(
            f"optimizer {number} is of another kind: it has {sorted(ours - theirs)[:4]} here, and "
            f"{sorted(theirs - ours)[:4]} in the checkpoint"
        )


def _check_model(number: int, mine: dict[str, Any], saved: dict[str, Any]) -> None:
    missing, foreign = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if missing or foreign:
        raise CheckpointError(
            f"model {number} does not fit the checkpoint: missing there {missing[:4] or 'none'}, "
            f"unknown here {foreign[:4] or 'none'}"
        )
    for name, value in mine.items():
        theirs = getattr(saved[name], "shape", ())
        if isinstance(value, torch.Tensor) and value.shape != theirs:
            raise CheckpointError(
                f"model {number}: {name} has shape {tuple(value.shape)} here and {tuple(theirs)} in the checkpoint"
            )


def restore(operator: OperatorBase, state: dict[str, Any]) -> None:
    """Takes a checked state."""
    parts, precision = operator._parts, operator._precision
    for model, saved in zip(parts.models, state["models"], strict=True):
        model.load_state_dict(saved if parts.shards is None else placed(saved, model.state_dict()))
    for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(placed_optimizer(saved, optimizer))
    for scheduler, saved in zip(parts.schedulers, state.get("schedulers") or [], strict=True):
        scheduler.load_state_dict(saved)
    scaler = state.get(precision.key) or state.get("amp")
    if precision.key and scaler:
        precision.load(scaler)
    operator.global_step = state.get("global_step", operator.global_step)
    operator.load_state_dict(state.get("operator"))  # type: ignore[attr-defined]


def random_state() -> dict[str, Any]:
    """This process's random states, in plain values and tensors only."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = _numpy()
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy

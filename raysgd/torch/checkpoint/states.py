"""A replica's state as one dictionary, and back: complete, unwrapped, checked before anything is changed."""

from __future__ import annotations

import io
import logging
import pickle
import random
import re
from collections.abc import Mapping
from typing import Any

import torch

from raysgd.errors import CheckpointError
from raysgd.storage.digest import SealingWriter
from raysgd.torch.checkpoint.archives import needs_trust
from raysgd.torch.checkpoint.files import SeenFile, UnseenError
from raysgd.torch.checkpoint.in_memory import opened
from raysgd.torch.fsdp import placed, placed_optimizer
from raysgd.torch.operator import TrainingOperator

__all__ = [
    "FORMAT",
    "completed",
    "dump",
    "dump_given",
    "gather",
    "numpy_or_none",
    "outline",
    "parse",
    "random_state",
    "read",
    "restore",
    "restore_random",
    "scaler_of",
    "shaped",
    "write",
]

logger = logging.getLogger(__name__)

FORMAT = "raysgd-torch"
VERSION = 1
PIECE = 1 << 20


def gather(operator: TrainingOperator) -> dict[str, Any]:
    """Models (bare), optimizers, schedulers, scaler and the operator's own state; tensors are shared, not copied."""
    parts, precision = operator._parts, operator._precision
    state: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "models": [model.state_dict() for model in parts.models],
        "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
        "operator": operator.state_dict(),
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


def dump_given(state: Any) -> memoryview:
    """Return a dictionary that the user passed as bytes. Raises CheckpointError when it is no checkpoint's content, or
    cannot be pickled."""
    given = shaped(dict(state) if isinstance(state, Mapping) else state)
    try:
        return dump(given)
    except Exception as error:
        raise CheckpointError(f"this state cannot be pickled ({type(error).__name__}: {error})") from error


def write(state: dict[str, Any], file: Any) -> None:
    """Write a checkpoint that ends with its digest."""
    with SealingWriter(file) as sealing:
        buffered = io.BufferedWriter(sealing, PIECE)
        torch.save(state, buffered)
        buffered.flush()
        buffered.detach()  # it would close what is not its own
        sealing.seal()


def parse(data: Any, *, trusted: bool) -> dict[str, Any]:
    """Read bytes; run no code from them unless they are trusted. Say what is wrong with others."""
    try:
        state = torch.load(opened(data), map_location="cpu", weights_only=not trusted)
    except Exception as error:
        said = re.sub(r"\x1b\[[0-9;]*m", "", (str(error).splitlines() or [type(error).__name__])[0])
        if bytes(data[:2]) != b"PK":  # torch writes zip files
            raise CheckpointError("this is no whole checkpoint: it is not a file as save() writes it") from error
        if not trusted and isinstance(error, pickle.UnpicklingError):
            raise needs_trust(said) from error
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


def shaped(state: Any) -> dict[str, Any]:
    """Is it one of ours, or of RaySGD v1's? Anything else is foreign."""
    if not isinstance(state, dict) or not isinstance(state.get("models"), list):
        keys = list(state)[:5] if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"this is not a checkpoint of raysgd: it holds {keys}, not models, optimizers and an epoch"
        )
    optimizers = state.get("optimizers") or []
    listed = isinstance(optimizers, list)
    if not listed or not all(isinstance(part, Mapping) for part in [*state["models"], *optimizers]):
        raise CheckpointError("this is not a checkpoint of raysgd: its models or optimizers are no state_dicts")
    kind, version = state.get("format", FORMAT), state.get("version", VERSION)
    if not isinstance(kind, str) or kind != FORMAT:
        raise CheckpointError(f"this checkpoint's format is {kind!r:.80}; a TorchTrainer reads {FORMAT!r}")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"this checkpoint's format version is {version!r:.80}, which is no version")
    if version > VERSION:
        raise CheckpointError(f"this checkpoint was written by a newer raysgd (format version {version})")
    return state


def scaler_of(state: dict[str, Any], key: str) -> Any:
    """Return the saved state of the gradient scaler; RaySGD v1 has it under another name."""
    return state.get(key) or state.get("amp")


def completed(saved: Any, optimizer: Any) -> Any:
    """Return an optimizer's saved state with the options that its file did not know yet, as they are here."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return saved
    known = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    groups = [{**here, **there} for here, there in zip(known, saved["param_groups"], strict=True)]
    return {**saved, "param_groups": groups}


def restore(operator: TrainingOperator, state: dict[str, Any]) -> None:
    """Take a checked state."""
    parts, precision = operator._parts, operator._precision
    for model, saved in zip(parts.models, state["models"], strict=True):
        model.load_state_dict(saved if parts.shards is None else placed(saved, model.state_dict()))
    for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(placed_optimizer(completed(saved, optimizer), optimizer))
    for scheduler, saved in zip(parts.schedulers, state.get("schedulers") or [], strict=True):
        scheduler.load_state_dict(saved)
    scaler = scaler_of(state, precision.key)
    if precision.key and scaler:
        precision.load(scaler)
    operator.global_step = state.get("global_step", operator.global_step)
    operator.load_state_dict(state.get("operator"))


def random_state() -> dict[str, Any]:
    """This process's random states, in plain values and tensors only."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = numpy_or_none()
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
    numpy = numpy_or_none()
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def numpy_or_none() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy

"""Convert an operator's state to one dictionary and back: complete, unwrapped, and without code in
the file. Worker."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from raysgd.core.tree import mapped
from raysgd.errors import CheckpointError
from raysgd.storage.seen import SeenFile, opened
from raysgd.torch import foreign
from raysgd.torch.group.fsdp import DIVIDED, placed, placed_optimizer
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.registered import Registered
from raysgd.torch.state.host_memory import HostCopy, HostMemory
from raysgd.torch.state.packing import Layout, has_bytes

logger = logging.getLogger("raysgd")

FORMAT = "raysgd-torch"
VERSION = 1
OPEN_FILES = "/proc/self/fd"
NOT_OURS = "not a checkpoint of raysgd"
# What torch says about an object that `weights_only=True` does not create.
FOREIGN = re.compile(r"GLOBAL (\S+)|(Can only (?:create|build)|Trying to call) .*")


def gather(operator: TrainingOperator, registered: Registered) -> dict[str, Any]:
    """Gather the state of the unwrapped models, optimizers, schedulers, gradient scaler and the
    operator itself, whose parts these are. Tensors are shared with the operator, not copied."""
    precision = registered.precision
    state: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "models": [model.state_dict() for model in registered.models],
        "optimizers": [optimizer.state_dict() for optimizer in registered.optimizers],
        "operator": operator.state_dict(),
        "global_step": operator.global_step,
    }
    if registered.schedulers:
        state["schedulers"] = [scheduler.state_dict() for scheduler in registered.schedulers]
    scaler = precision.state()
    if scaler is not None:
        state[precision.key] = scaler
    return state


def unchanging(state: dict[str, Any], memory: HostMemory, *, in_shards: bool) -> tuple[dict[str, Any], HostCopy]:
    """Make a state that training does not change, and the copy of which its tensors are a part.
    What was gathered is a copy already."""
    shards = {name: state[name] for name in DIVIDED if in_shards and name in state}
    sources, copies = list[torch.Tensor](), list[torch.Tensor]()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or not (has_bytes(tensor) and tensor.numel()):
            return on_cpu(tensor)
        sources.append(tensor)
        copies.append(torch.empty(0, dtype=tensor.dtype, device="cpu"))
        return copies[-1]

    unchanged = copied({name: value for name, value in state.items() if name not in shards}, moved) | shards
    layout = Layout(sources)
    copy = memory.copy(layout)
    for tensor, content in zip(copies, layout.copies(copy.room), strict=True):
        tensor.data = content
    return unchanged, copy


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def copied(value: Any, moved: Callable[[torch.Tensor], torch.Tensor] = on_cpu) -> Any:
    """Make a deep copy on the CPU. A tensor at two places (tied weights) is copied once, by
    `moved`."""
    copies: dict[Any, torch.Tensor] = {}

    def leaf(value: Any, *path: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        same: Any = id(value)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested
        if plain and value.layout == torch.strided and value.data_ptr():  # others have no memory of their own
            bits = (value.requires_grad, value.is_conj(), value.is_neg())
            same = (type(value), value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), bits)
        if same not in copies:
            new = moved(value).requires_grad_(value.requires_grad and value.is_leaf)
            copies[same] = torch.nn.Parameter(new, new.requires_grad) if isinstance(value, torch.nn.Parameter) else new
        return copies[same]

    return mapped(leaf, value)


def pickling_on_cpu() -> Any:
    """Make what `torch.save` pickles with, so that tensors are stored as if they were on the CPU.
    Those that share memory still share it."""
    memory: dict[int, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is not torch.Tensor or value.device.type != "cuda" or value.layout != torch.strided:
                return NotImplemented
            value = value.resolve_conj().resolve_neg()
            storage = value.untyped_storage()
            if storage.data_ptr() not in memory:
                memory[storage.data_ptr()] = storage.cpu()
            place = value.storage_offset(), value.size(), value.stride()
            moved = torch.empty(0, dtype=value.dtype, device="cpu").set_(memory[storage.data_ptr()], *place)
            return moved.requires_grad_(value.requires_grad).__reduce_ex__(2)

    return SimpleNamespace(Pickler=Pickler, __name__="pickle")


def write(state: dict[str, Any], file: Any) -> None:
    """Write a state that can be read without a GPU, with its checksums, which users can turn off
    for their own files."""
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(state, file, pickle_module=pickling_on_cpu() if torch.cuda.is_initialized() else pickle)
    finally:
        torch.serialization.set_crc32_options(chosen)


def dump(state: dict[str, Any]) -> memoryview:
    """Write a state as bytes, which are copied only once."""
    buffer = io.BytesIO()
    write(state, buffer)
    return buffer.getbuffer()


def dump_given(state: Any) -> memoryview:
    """Write a user's dictionary as bytes. Raise CheckpointError if it is not a state."""
    content = shaped(dict(state) if isinstance(state, Mapping) else state)
    try:
        return dump(content)
    except Exception as error:
        raise CheckpointError(f"this state cannot be pickled ({type(error).__name__}: {error})") from error


def parse(source: Any, *, trusted: bool) -> dict[str, Any]:
    """Read the state in a file, or in its bytes; code in them runs only if they are trusted. Raise
    CheckpointError if they are not a checkpoint."""
    return _loaded(source if hasattr(source, "read") else opened(source), trusted=trusted)


def _loaded(file: Any, **how: Any) -> dict[str, Any]:
    return shaped(_content(file, **how))


def _content(file: Any, *, trusted: bool, kept: type[Exception] = CheckpointError, **how: Any) -> Any:
    """Read what is in a file. Translate all errors but those `kept`."""
    try:
        return torch.load(file, map_location="cpu", weights_only=not trusted, **how)
    except kept:
        raise
    except Exception as error:
        raise _unreadable(error, trusted=trusted) from error


def _unreadable(error: Exception, *, trusted: bool) -> CheckpointError:
    """Explain an error of `torch.load`."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
    foreign_object = FOREIGN.search(said)
    if foreign_object is not None and not trusted:
        return CheckpointError(
            f"it contains Python objects other than plain values and tensors ({foreign_object[1] or foreign_object[0]}), and "
            "reading these can run code from the file. If TorchTrainer.save() wrote it (the objects are usually in the operator's "
            "own state) and you trust its author, pass trusted=True. If another program wrote it, it is not a checkpoint of "
            "raysgd: load the weights of its model in setup, before register()"
        )
    return CheckpointError(f"not a complete checkpoint: it cannot be read ({said.splitlines()[0]})")


def read(file: SeenFile, *, trusted: bool, mapped: Collection[str]) -> dict[str, Any]:
    """Read the state in a file. The tensors of its parts with the names in `mapped` are read from
    the file when they are used. Raise `UnseenError` if this process does not see the file."""
    with file.opened() as content:
        # The path of the open file, because the name in the folder could be given to another file.
        path = f"{OPEN_FILES}/{content.fileno()}"
        if not (mapped and os.path.exists(path)):
            return _loaded(content, trusted=trusted, kept=OSError)
        state = _loaded(path, trusted=trusted, kept=OSError, mmap=True)
        return {name: value if name in mapped else copied(value) for name, value in state.items()}


def peek(path: str | os.PathLike[str]) -> Any:
    """Read what is in a verified file, whose tensors stay there. It runs no code."""
    return _content(path, trusted=False, mmap=True)


def foreign_types(path: str | os.PathLike[str]) -> list[str]:
    """The classes and functions that a file needs besides values and tensors."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def shaped(state: Any) -> dict[str, Any]:
    """Accept a loaded state if raysgd or RaySGD v1 wrote it. Raise CheckpointError if not."""
    if not isinstance(state, dict) or not isinstance(state.get("models"), list):
        content = list(state)[:5] if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{NOT_OURS}: it contains {content}, not models, optimizers and an epoch. To start from the weights of a model, load "
            "them in setup, before register(): model.load_state_dict(torch.load(path, weights_only=True))"
        )
    optimizers = state.get("optimizers") or []
    listed = isinstance(optimizers, list)
    if not listed or not all(isinstance(part, Mapping) for part in [*state["models"], *optimizers]):
        raise CheckpointError(f"{NOT_OURS}: its models or optimizers are not state dictionaries")
    if state.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"this checkpoint's format is {state['format']!r:.80}; a TorchTrainer reads {FORMAT!r}")
    if state.get("version", VERSION) not in range(1, VERSION + 1):
        raise CheckpointError(
            f"this checkpoint was written by a newer raysgd (format version {state['version']!r:.80})"
        )
    return state


def completed(saved: Any, optimizer: Any) -> Any:
    """Complete an optimizer's saved state with the options that the torch which saved it did not
    have yet, as they are here, and with `capturable` as it is here: a step that was captured as a
    CUDA graph can be continued on CPUs."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "param_groups" not in saved:
        return saved
    pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    groups = [{**here, **there} | {name: here[name] for name in here if name == "capturable"} for here, there in pairs]
    return {**saved, "param_groups": groups}


def parts_to_map(registered: Registered) -> Collection[str]:
    """The parts of a state the load of which copies tensors and does nothing else."""
    if registered.shards is not None or not all(map(foreign.loads_by_copying, registered.models)):
        return ()
    return ("models", "optimizers") if all(map(foreign.is_usual_optimizer, registered.optimizers)) else ("models",)


def unmapped(saved: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, which was read from a file, in memory: that of its present state,
    where it fits."""
    present = optimizer.state_dict()["state"]

    def moved(value: Any, number: Any, name: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        here = present[number].get(name) if number in present else None
        if type(here) is torch.Tensor and (here.dtype, here.shape) == (value.dtype, value.shape) and value.dim():
            return here.copy_(value)
        return value.clone()  # also a single number, which may be on another device, depending on the options

    state = {
        number: {name: moved(value, number, name) for name, value in values.items()}
        if isinstance(values, dict)
        else copied(values)
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def restore(operator: TrainingOperator, registered: Registered, state: dict[str, Any]) -> None:
    """Load a checked state; the operator's own part last, as only it can check that."""
    precision = registered.precision
    for model, saved in zip(registered.models, state["models"], strict=True):
        model.load_state_dict(saved if registered.shards is None else placed(saved, model.state_dict()))
    for optimizer, saved in zip(registered.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(placed_optimizer(completed(saved, optimizer), optimizer))
    for scheduler, saved in zip(registered.schedulers, state.get("schedulers") or [], strict=True):
        scheduler.load_state_dict(saved)
    registered.schedules_at = {}
    if precision.key and (scaler := saved_scaler(registered, state)):
        precision.load(scaler)
    operator.global_step = state.get("global_step", operator.global_step)
    operator.load_state_dict(state.get("operator"))


def saved_scaler(registered: Registered, state: dict[str, Any]) -> Any:
    """The saved state of the gradient scaler, which RaySGD v1 called "amp", if any."""
    return state.get(registered.precision.key) or state.get("amp")

"""What `raysgd drill` adds to a user's operator: it obeys faults, and records what the operator does. Worker.

The driver and a worker process share a folder. In it, a worker with process id N has

    N.worker      changed after each optimizer step, so that the driver knows who is training
    N.order       written by the driver: a fault that the process does to itself before its next step, and its seconds.
                  The process that obeys it renames it to N.taken
    N.swallowed   one line of JSON for each error of a peer that the operator did not pass on
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import pickle
import random
import time
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from raysgd.core.hang import is_user_frame
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.process_group import is_peer_failure
from raysgd.training.replica_base import accepted_arguments

__all__ = ["INJECTED", "Drilled", "drilled", "report"]

INJECTED = "injected by raysgd drill"
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "barrier",
    "broadcast",
    "broadcast_object_list",
)
DEEPEST, PROBED_SAMPLES = 8, 5
ALIKE = (DataLoader, Dataset, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def drilled(operator_cls: type[TrainingOperator], folder: Path) -> type[TrainingOperator]:
    """Return a subclass of a user's operator class. It has a method `train_epoch` only if the user's class has one."""
    own_loop = operator_cls.train_epoch is not TrainingOperator.train_epoch
    base = DrilledLoop if own_loop else Drilled
    return type(operator_cls.__name__, (base, operator_cls), {"_drill_folder": str(folder)})


class Recorder:
    """Owns what is known about the operator of this process.

    initial   digests of the operator's attributes after `setup`; `joined`: before its first batch
    reads     attributes that were read in a batch before the batch has set them
    raised    the newest error of a peer, until it is clear whether the operator passed it on
    longest   the seconds of the longest batch
    """

    def __init__(self, folder: str, library: Iterable[str]) -> None:
        self.folder, self.library = Path(folder), {*library, "_recorder"}
        self.initial: dict[str, str] = {}
        self.joined: dict[str, str] | None = None
        self.reads: set[str] = set()
        self.written: set[str] = set()
        self.watching = False
        self.raised: BaseException | None = None
        self.longest, self.began = 0.0, 0.0
        self._mark = self.folder / f"{os.getpid()}.worker"

    def begin(self, operator: TrainingOperator) -> None:
        """Note that a batch, or a part of an own loop, begins."""
        if self.joined is None:
            self.joined = digests(operator, self.library)
        self.written.clear()
        self.raised = None

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, and note the errors of peers that it raises."""

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return function(*given, **named)
            except Exception as error:
                if is_peer_failure(error):
                    self.raised = error
                raise

        return call

    def returned(self) -> None:
        """Note that the operator's method has returned, or ended at a batch boundary: it has swallowed a peer's error."""
        error, self.raised = self.raised, None
        if error is None:
            return
        trace, where = error.__traceback__, ""
        while trace is not None and not where:  # the first frame is the one that caught it
            code = trace.tb_frame.f_code
            line = f"{code.co_filename}:{trace.tb_lineno} {code.co_name}"
            where, trace = line if is_user_frame(line) else "", trace.tb_next
        text = json.dumps({"where": where, "error": f"{type(error).__name__}: {error}"[:300]})
        with open(self.folder / f"{os.getpid()}.swallowed", "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def before_step(self, *_: Any) -> None:
        taken = self._mark.with_suffix(".taken")
        try:
            self._mark.with_suffix(".order").rename(taken)  # at once, because the driver may withdraw it at any moment
        except FileNotFoundError:
            return
        kind, seconds = taken.read_text(encoding="utf-8").split()
        if kind == "memory":
            raise MemoryError(INJECTED)
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # which does not release the lock

    def after_step(self, *_: Any) -> None:
        self._mark.touch()

    def follow(self, optimizer: Any) -> None:
        """Be told of the steps of an optimizer. Those that are no subclass of `torch.optim.Optimizer` have no hooks."""
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(self.before_step)
            optimizer.register_step_post_hook(self.after_step)
            return
        step = optimizer.step

        @functools.wraps(step)
        def followed(*given: Any, **named: Any) -> Any:
            self.before_step()
            result = step(*given, **named)
            self.after_step()
            return result

        optimizer.step = followed

    def ended(self) -> None:
        """Note the end of a batch. The next one begins here, and so includes the wait for its data."""
        now = time.monotonic()
        self.longest, self.began = max(self.longest, now - self.began), now


class Drilled(TrainingOperator):
    """Comes before a user's operator class among the bases of what `drilled` returns."""

    _drill_folder: str
    _recorder: Recorder

    def setup(self, config: dict[str, Any]) -> None:
        recorder = Recorder(self._drill_folder, vars(self))
        self._recorder = recorder
        super().setup(config)
        for optimizer in self._parts.optimizers:
            recorder.follow(optimizer)
        # A worker process has one operator, and ends with the drill.
        torch.Tensor.backward = recorder.watch(torch.Tensor.backward)  # type: ignore[method-assign]
        DistributedDataParallel.forward = recorder.watch(DistributedDataParallel.forward)  # type: ignore[method-assign]
        for name in COLLECTIVES:
            setattr(dist, name, recorder.watch(getattr(dist, name)))
        recorder.initial = digests(self, recorder.library)
        recorder.watching = True

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        recorder = super().__getattribute__("__dict__").get("_recorder")
        if recorder is not None and recorder.watching and name not in recorder.written:
            recorder.reads.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        recorder = self.__dict__.get("_recorder")
        if recorder is not None:
            recorder.written.add(name)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        recorder = self._recorder
        if not batch_info.get("batch_idx"):
            recorder.began = time.monotonic()
        recorder.begin(self)
        metrics = super().train_batch(batch, batch_info)
        recorder.returned()
        recorder.ended()
        return metrics


class DrilledLoop(Drilled):
    """For operators with a loop of their own, which may not call `train_batch`."""

    def train_epoch(self, iterator: Iterable[Any], **named: Any) -> dict[str, Any]:  # type: ignore[override]
        recorder, began = self._recorder, time.monotonic()
        recorder.begin(self)
        steps = self.global_step
        given, accepted = accepted_arguments(super().train_epoch, iterator, **named)
        try:
            result: dict[str, Any] = super().train_epoch(*given, **accepted)
        except Exception:
            recorder.raised = None
            raise
        except BaseException:  # the iterator's request to stop at a batch boundary
            recorder.returned()
            raise
        recorder.returned()
        each = (time.monotonic() - began) / max(self.global_step - steps, 1)
        recorder.longest = max(recorder.longest, each)
        return result


# -- what the driver asks -----------------------------------------------------------------------------


def report(operator: Drilled) -> dict[str, Any]:
    """Return what is known about the operator of this process.

    changed     attributes that have another value than after `setup`, and that a batch has read before setting them
    unrestored  attributes that had the value of `setup` when the worker began to train
    begun       whether the worker has begun a batch
    longest_s   the seconds of the longest batch so far
    data        the epoch, how many samples the training data has, and a digest of some of them in this epoch
    batches     how many batches an epoch has on each worker, -1 if that is unknown
    """
    batches = operator._batches_per_epoch(operator.world_size)
    recorder = operator._recorder
    now, joined = digests(operator, recorder.library), recorder.joined or {}
    changed = [name for name in now if now[name] != recorder.initial.get(name, "") and name in recorder.reads]
    unrestored = [name for name in now if joined.get(name, "") == recorder.initial.get(name, "")]
    return {
        "pid": os.getpid(),
        "changed": changed,
        "unrestored": unrestored,
        "begun": recorder.joined is not None,
        "longest_s": recorder.longest,
        "data": (operator._epochs_before(), *_data(operator._parts.train_loader)),
        "batches": -1 if batches is None else batches,
    }


def digests(operator: TrainingOperator, library: set[str]) -> dict[str, str]:
    """Return a digest of each attribute that the user's code has set. What is registered is the same on all ranks."""
    parts = operator._parts
    known: list[Any] = [*parts.wrapped, *parts.optimizers, *parts.schedulers, *parts.metrics.values(), parts.criterion]
    known += [part for model in parts.models for part in (*model.modules(), *model.parameters(), *model.buffers())]
    known += [parts.train_loader, parts.validation_loader, parts.test_loader, operator.config]
    registered = {id(each) for each in known if each is not None}
    return {name: _digest(each, registered) for name, each in vars(operator).items() if name not in library}


def _digest(value: Any, registered: set[int], depth: int = 0) -> str:
    """Return a digest of a value, the same for all values that cannot be compared."""
    if id(value) in registered or isinstance(value, ALIKE) or depth > DEEPEST:
        return "alike"
    inner = functools.partial(_digest, registered=registered, depth=depth + 1)
    if isinstance(value, torch.Generator):
        return inner(value.get_state())
    if isinstance(value, torch.Tensor):
        bare = value.detach().cpu().contiguous().reshape(-1)
        return _hash(f"{value.dtype}{tuple(value.shape)}", bare.view(torch.uint8).numpy().tobytes())
    if isinstance(value, numpy.ndarray):
        return _hash(f"{value.dtype}{value.shape}", value.tobytes() if value.dtype != object else b"")
    if isinstance(value, Mapping):
        return _hash("mapping", *(f"{name!r}={inner(each)}".encode() for name, each in value.items()))
    if isinstance(value, (set, frozenset)):
        return _hash("set", *sorted(inner(each).encode() for each in value))
    if isinstance(value, nn.Module) or callable(getattr(value, "state_dict", None)):
        return inner(value.state_dict())
    if isinstance(value, Iterable) and hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        return _hash(type(value).__name__, *(inner(each).encode() for each in value))
    if isinstance(getattr(value, "__dict__", None), dict):
        return inner(vars(value))
    try:
        return _hash(type(value).__name__, pickle.dumps(value))
    except Exception:  # a user's object may raise anything
        return "alike"


def _hash(kind: str, *parts: bytes) -> str:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def _data(loader: Any) -> tuple[int, str]:
    """Return the length of the training data, and a digest of some of its samples, "" if they are not the same when they are
    read twice."""
    data = getattr(loader, "dataset", loader)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return -1, ""
    count = len(data)
    chosen = random.Random(count).sample(range(count), min(PROBED_SAMPLES, count))
    first, second = (_hash("samples", *(_sample(data, index).encode() for index in chosen)) for _ in range(2))
    return count, first if first == second else ""


def _sample(data: Any, index: int) -> str:
    """Return a digest of a sample. The random numbers that it draws are always the same, and training's are not used up."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(index)
            numpy.random.seed(index)
            torch.manual_seed(index)
            return _digest(data[index], set())
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)

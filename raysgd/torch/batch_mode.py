"""`ElasticConfig(batch="auto")`: see what user code does in its first step, and hold the decision
that follows from it. Worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
from torch import is_tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from raysgd.core.batch_mode import (
    GLOBAL,
    LINES,
    NOT_HARMFUL,
    SCHEDULERS,
    BatchMode,
    FirstStep,
    agreed,
    decide,
    refused,
)
from raysgd.core.outcomes import NotExact
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.buffers import KeepBuffers
from raysgd.torch.data.sampling import Division
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import content_version, is_compiled, run_after_backward
from raysgd.torch.parts import Parts, sums_of
from raysgd.torch.schedules import steps_of
from raysgd.torch.settings import TorchSettings
from raysgd.torch.skipped_steps import gathered_objects
from raysgd.torch.step_options import settings_of
from raysgd.training.feed import Feed
from raysgd.training.operator_base import log_change
from raysgd.training.position import Position
from raysgd.training.step import Policy, Step

logger = logging.getLogger("raysgd")

STATIC_GRAPH = "DDP's static_graph exchanges gradients in each backward pass", "leave static_graph out"
MOST_LOOKED_AT, DEEPEST, LARGEST_ARRAY = 10_000, 3, 1 << 20
CHANGES_GRADIENTS = "changes gradients between the backward pass and the step"
CLIPS = "clip with TrainingOptions(clip_norm=...)"
HELPERS = "call self.zero_grad(), self.backward(loss) and self.step(optimizer) instead of torch's methods"
RATES = "compute them from batch_info['global_step'] before the backward pass, or register a scheduler"
MISSING = object()
PLAIN = (int, float, complex, str, bytes, bool, type(None))
# What changes in an operator without being the user's: parts, and what torch or a generator changes by itself.
NOT_LOOKED_AT = (
    type,
    FunctionType,
    MethodType,
    ModuleType,
    DataLoader,
    torch.Generator,
    torch.optim.Optimizer,
)


class KeepBatch(Policy):
    """Owns the mode, which is part of the position: all ranks decide from the first step that they
    commit, and agree whenever a process group has formed. It looks at what user code does in this
    step, and in later ones that come in pieces: nothing but backward passes may change gradients
    between two pieces, and there is one step, after the last one. With "auto", another mode follows
    from what is not exact; with "global", which looks at less, it is an error.

    What it looks at are the attributes that user code adds to an `operator`, and its parts. `why`
    is what the operator's class has against pieces.
    """

    in_usual_steps = False

    def __init__(self, operator: Any, buffers: KeepBuffers, why: BatchMode | None) -> None:
        parts: Parts = operator._parts
        settings: TorchSettings = operator._settings
        self._operator, self._parts, self._buffers = operator, parts, buffers
        self._usual, self._asked = settings.num_workers, settings.elastic.batch
        self._why = (why or _why_not(settings)) if self._asked == "auto" else None
        self._strict = self._asked == GLOBAL and settings.options.accumulate == 1
        self.option = "ElasticConfig(batch='global')" if self._strict else ""
        self.position = Position()
        self._own_names = {*vars(operator)}  # of attributes that are not the user's
        self._feed: Feed | None = None
        self._decides = False  # in the running step
        self._watches = False  # the running batch or piece
        self._was_trained = False  # whether the default loop has trained it
        # Of the operator's helpers, in it. Several optimizers are cleared together, and stepped together.
        self._calls: list[str] = []
        self._stepped: list[Any] = []  # the optimizers that have made a step in it
        self._seen = FirstStep()
        self._before: tuple[list[Any], dict[str, Any]] | None = None  # what the last look at it has shown
        self._own_calls: OwnCalls | None = None
        # Since the first piece of a batch: the gradients' versions after the backward pass, the settings of parameter groups
        # in the steps that the pieces asked for, and how many steps each schedule had made.
        self._versions: list[tuple[int, int]] | None = None
        self._settings_used: list[Any] | None = None
        self._schedules: list[Any] = []

    @property
    def mode(self) -> BatchMode:
        """Return what holds now. What the user has asked for, and what the settings refuse, holds
        whatever a state says."""
        found = self._known
        if self._asked == "auto":
            return found if self._why is None else self._why
        return BatchMode(self._asked, in_parts=found.in_parts and self._asked == GLOBAL, tested=found.tested)

    @property
    def possible(self) -> bool:
        """Return whether batches may come in pieces."""
        return self._asked == GLOBAL or (self._asked == "auto" and self._why is None)

    def refuse(self, reason: str, advice: str) -> None:
        """Note, in `setup`, that the batch cannot be kept."""
        if self._asked == "auto" and self._why is None:
            self._why = refused(reason, advice)

    def division(self, unit: int) -> Division:
        """Return how a step is divided; `unit` is how many units one worker takes in it, and at
        most in a piece."""
        mode, whole = self.mode, unit * self._usual
        if not mode.keeps_batch:
            return Division()
        if self._operator._has_own_steps:  # it gets its part in one piece
            return Division(whole)
        return Division(whole, unit, self._usual if mode.in_parts else None)

    # -- the first step, and pieces -------------------------------------------------------------------

    def on_epoch(self, feed: Feed) -> None:
        self._feed = feed
        self._decides = feed.looked_at = (
            self._asked != "per_worker" and self._why is None and not self.mode.tested and self.position.parked is None
        )

    def rest(self) -> None:
        self._end_look()
        self._feed, self._decides, self._watches, self._versions = None, False, False, None

    def _end_look(self) -> None:
        self._end_counting()
        self._before = None

    def _end_counting(self) -> None:
        """Count no further collective calls, because `train_batch` has ended, or its backward pass
        begins, which exchanges gradients."""
        if self._own_calls is not None:
            self._seen.together |= self._own_calls.ended() > 0
            self._own_calls = None

    def begin(self, step: Step) -> None:
        piece, auto = not step.current.whole, self._asked == "auto"
        if step.piece == 0:
            self._versions = self._settings_used = None
            self._schedules = self._schedules_now()
        elif auto and not self._was_trained:
            raise NotExact(*OWN_LOOP[1:3])
        else:
            self._check_schedules()
        self._end_look()  # a user's own loop has not called `trained`
        self._was_trained, self._calls, self._stepped = False, [], []
        self._watches = self._decides or piece or (self._strict and step.piece > 0)
        if auto and self._watches:
            if not self._decides or step.place == 0:
                self._seen = FirstStep()
            self._seen.calls.append(self._calls)
            self._before, self._operator._sized = self._now(), False
            assert self._feed is not None
            self._own_calls = OwnCalls(self._feed.collectives, self._parts.wrapped, sharded=self._parts.shards_made)

    def trained(self, step: Step) -> None:
        """Refuse what `train_batch` has done in a piece that it ought to do once in a batch."""
        self._was_trained = True
        self._check_schedules()
        if self._before is None:
            return
        if not step.current.whole:
            self._check_settings()
        self._see()
        self._end_look()
        if not self._decides and not (found := decide(self._seen)).keeps_batch:
            raise NotExact(found.reason, found.advice)

    def _see(self) -> None:
        """Note what user code has done since the last look."""
        if self._before is not None:
            (schedules, attributes), self._before = self._before, self._now()
            self._seen.scheduled |= schedules != self._before[0]
            self._seen.changed = self._seen.changed or _changed(attributes, self._before[1])

    def cleared(self, step: Step) -> None:
        if self._calls[-1:] != ["zero_grad"]:
            self._calls.append("zero_grad")

    def weighted(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        first, strict = "backward" not in self._calls, self._strict and self._watches
        if strict and "step" in self._calls:
            self._refuse(
                "makes a step and then computes gradients with the new weights", "step after all backward passes"
            )
        if strict and self._decides and "zero_grad" not in self._calls:
            self._refuse("does not clear its gradients with self.zero_grad() before the backward pass", HELPERS)
        self._calls.append("backward")
        self._end_counting()
        self._seen.sized |= self._operator._sized
        if first and not (step.closing and self._parts.options.accumulate > 1):  # a shorter window multiplies gradients
            self._check_unchanged("clears or changes gradients between two pieces of a batch", LINES)
        self._versions = None
        if self._watches and (strict or not step.current.whole) and loss.requires_grad:
            loss.register_hook(lambda _: run_after_backward(lambda: run_after_backward(self._note_versions)))
        return loss

    def awaits(self, step: Step, optimizer: Any) -> None:
        self._note_step(optimizer)
        self._check_unchanged(CHANGES_GRADIENTS, CLIPS)
        if not step.current.whole:
            self._check_settings()

    def check(self, step: Step, optimizer: Any) -> None:
        self._note_step(optimizer)
        if self._strict and not self._parts.exchange.at_the_step:
            self._check_unchanged(CHANGES_GRADIENTS, CLIPS)
        if step.piece > 0:
            self._check_settings()
        self._see()

    def _note_step(self, optimizer: Any) -> None:
        if self._strict and self._decides and "backward" not in self._calls:
            self._refuse("makes a step without self.backward(loss)", HELPERS)
        if self._calls[-1:] != ["step"] or any(each is optimizer for each in self._stepped):
            self._calls.append("step")
        self._stepped.append(optimizer)

    def _check_settings(self) -> None:
        """Refuse code that changes learning rates after the step of a piece, or again in each."""
        now = settings_of(self._parts.optimizers)
        if self._settings_used is not None and self._settings_used != now:
            self._refuse(
                "changes settings of its optimizer, such as the learning rate, in each piece of a batch", RATES
            )
        self._settings_used = now

    def _check_schedules(self) -> None:
        if self._strict and self._watches and self._schedules != self._schedules_now():
            self._refuse("steps its scheduler", SCHEDULERS)

    def _schedules_now(self) -> list[Any]:
        return [steps_of(each) for each in self._parts.schedulers]

    def _check_unchanged(self, found: str, advice: str) -> None:
        if self._versions is not None and self._parts.gradient_versions() != self._versions:
            self._refuse(found, advice)

    def _note_versions(self) -> None:
        """Note what changes with the gradients, after the exchange, which ends in such a call,
        too."""
        self._versions = self._parts.gradient_versions()

    def _refuse(self, found: str, advice: str) -> NoReturn:
        if self._asked == "auto":
            raise NotExact(f"train_batch {found}", advice)
        raise ConfigError(
            "ElasticConfig(batch='global') lets each worker process its batch in several pieces when there are fewer workers, with one "
            f"step after the last of them, and train_batch {found}: {advice}, or use batch='per_worker'"
        )

    def stepped(self, step: Step, optimizer: Any) -> None:
        if self._before is not None:  # the user's hooks may change what they do once in a batch
            self._before = self._now()

    def direct(self, step: Step, optimizer: Any) -> None:
        self._seen.direct = True
        if self._asked == "auto" and not all(each.whole for each in step.drawn):
            raise NotExact("train_batch calls optimizer.step() itself", LINES)

    def on_step(self, step: Step) -> None:
        """Decide, when the first step is committed."""
        if not self._decides or step.outcome == "undone":
            return
        feed, before, decided = self._feed, self.mode, OWN_LOOP
        assert feed is not None
        self._decides = feed.looked_at = False
        if self._asked == GLOBAL:
            decided = BatchMode(GLOBAL, in_parts=self._buffers.are_moving)
        elif self._was_trained:
            self._seen.divided = isinstance(feed.source, PlannedSource) and feed.source.divides
            decided = decide(self._seen)
            if self._seen.divided and type(feed.source.loader).__iter__ is not DataLoader.__iter__:
                decided = OWN_ITERATION
        merged, short = agreed([before, decided]), feed.rank_info.world_size != self._usual
        self._set(
            (agreed(_of_all(merged, self._parts.calls.control)) if short else merged)._replace(
                tested=True, logged=self._known.logged
            )
        )
        if short:
            self._log_change(feed.rank_info)
            if not before.mode and self.mode.keeps_batch and feed.rank_info.world_rank == 0:
                logger.warning(FIRST_STEP, feed.rank_info.world_size, self._usual)
            if self.mode[0::3] != before[0::3]:
                feed.reopen()

    def _set(self, mode: BatchMode) -> None:
        self.position.batch_mode = None if mode == BatchMode() else tuple(mode)

    @property
    def _known(self) -> BatchMode:
        """Return what the position says."""
        return BatchMode(*(self.position.batch_mode or ()))

    def _now(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what shows whether user code steps schedulers, or changes weights, or attributes
        of the operator or the model."""
        # With the default `train_batch`, the next batch may be read in it, which may change the data set.
        parts, own_batch = self._parts, bool(self._operator._overrides("train_batch"))
        contents = Contents({id(each) for each in _registered(self._parts)}, data_sets=own_batch)
        own = {name: value for name, value in vars(self._operator).items() if name not in self._own_names}
        attributes = {name: contents.of(value) for name, value in own.items() if value is not self}
        attributes["config"] = contents.of(self._operator.config)
        attributes["train_loader.dataset"] = contents.of(getattr(parts.train_loader, "dataset", None), DEEPEST)
        for number, model in enumerate(() if parts.shards_made else parts.models):
            named = model.named_parameters()
            attributes |= {f"{_name(number)}.{name}": contents.of_tensor(each) for name, each in named}
        if self._decides:
            held = dict(_held(parts.models)).items()
            attributes |= {name: Held(contents.of(each)) if is_tensor(each) else each for name, each in held}
        elif self._operator.world_rank == 0:  # whose buffers other ranks get
            still = [(name, getattr(module, name, None)) for module, name in self._buffers.still]
            attributes |= {f"model...{name}": contents.of_tensor(each) for name, each in still if each is not None}
        contents.read()
        return self._schedules_now(), attributes

    def interfered(self, found: NotExact) -> None:
        """Keep each worker's batch from now on, because user code does not allow pieces after
        all."""
        self._set(refused(found.reason, found.advice)._replace(tested=True))

    # -- all ranks together ---------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        """Agree with the other ranks of a new generation, and log once what changes."""
        if self._asked != "per_worker" and self._why is None and not rank_info.solo:
            every = _of_all(self._known, self._parts.calls.control)
            tested, logged = any(each.tested for each in every), any(each.logged for each in every)
            self._set(agreed(every)._replace(tested=tested, logged=logged))
        self._log_change(rank_info)

    def _log_change(self, rank_info: RankInfo) -> None:
        if self._asked == "auto":
            log_change(self.mode, self.position, rank_info, self._usual)

    def loaded(self) -> None:
        """Look at a step again, because a checkpoint was loaded, which other code may have
        written."""
        known = self._known
        self._set(known._replace(tested=False) if known.keeps_batch else BatchMode(logged=known.logged))


def _of_all(mode: BatchMode, control: Control) -> list[BatchMode]:
    return [BatchMode(*each) for each in gathered_objects(tuple(mode), control)]


FIRST_STEP = (
    "%d of %d workers made the first step of this run, each with its batch size, because it shows whether the batch of all workers can be "
    "kept. It had another number of samples, so the run will have other results than one with all of them. From now on, the batch is kept"
)
OWN_LOOP = refused(
    "train_epoch has a loop of its own, or gives the default one another iterator, which would get pieces of batches",
    NOT_HARMFUL,
)
OWN_ITERATION = refused(
    "the DataLoader's class has an __iter__ of its own, which would get pieces of batches", NOT_HARMFUL
)
MAKES_STEPS = refused(
    "a LightningModule makes its steps itself", "pass ElasticConfig(batch='global'), which needs more memory"
)
RESIZES = refused(
    "resized() of the operator adapts to the number of workers",
    "leave resized() out, " + NOT_HARMFUL.replace("pass", "or pass"),
)


def _why_not(settings: TorchSettings) -> BatchMode | None:
    """Return what the trainer's arguments have against pieces."""
    elastic, options = settings.elastic, settings.options
    for applies, reason, advice in (
        (elastic.lr is not None, f"lr={elastic.lr!r} scales the learning rates for such steps", "leave lr out"),
        (options.parallel is None, "with parallel=None, the operator averages the gradients", "leave parallel out"),
        (options.gradients == "ranks", "gradients='ranks' is not a mean over samples", "leave gradients out"),
        (options.precision == "apex", "Apex steps copies of the weights", "use precision='fp16' or 'bf16'"),
        (options.sync_batchnorm, "sync_batchnorm normalizes the samples of all workers together", "leave it out"),
        (bool(options.ddp_args.get("static_graph")), *STATIC_GRAPH),
        ("powersgd" in (options.hook_name or ""), "PowerSGD keeps errors of each worker", "leave comm_hook out"),
    ):
        if applies:
            return refused(reason, advice)
    return None


class OwnCalls:
    """Counts the collective calls that are not made by DDP or FSDP, from now until it is ended.
    `count` returns those of all code."""

    def __init__(self, count: Callable[[], int], models: Sequence[nn.Module], *, sharded: bool) -> None:
        self._count, self._began, self._models, self._entered = count, count(), 0, 0
        self._hooks: list[Any] = []
        for each in models:
            if not (sharded or isinstance(each, DistributedDataParallel)):
                continue
            inner: Any = each if sharded else each.module
            self._hooks.append(each.register_forward_pre_hook(self._enter))
            if sharded or is_compiled(inner):  # which does not call new hooks
                self._hooks.append(each.register_forward_hook(self._leave))
            else:  # DDP sends buffers before the user's model begins
                self._hooks.append(inner.register_forward_pre_hook(self._leave))

    def _enter(self, *_: Any) -> None:
        self._entered = self._count()

    def _leave(self, *_: Any) -> None:
        self._models += self._count() - self._entered

    def ended(self) -> int:
        """Stop, and return how many calls were made."""
        made = self._count() - self._began - self._models if self._hooks else 0
        for each in self._hooks:
            each.remove()
        return made


# -- attributes -------------------------------------------------------------------------------------------


def _registered(parts: Parts) -> Iterator[Any]:
    """Yield what raysgd and torch change in each step, or merge over pieces."""
    yield from (*parts.models, *parts.wrapped, *parts.optimizers, *parts.schedulers, *parts.metrics.values())
    yield from (parts.train_loader, parts.validation_loader, parts.test_loader)
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
    for model in parts.models:
        yield from model.parameters()
        yield from model.buffers()


class Contents:
    """Says what is different after a change of a value, as far as that can be seen quickly: of
    large objects, a part is looked at. What it has returned is complete after `read`."""

    def __init__(self, known: set[int], *, data_sets: bool) -> None:
        self._known, self._left, self._data_sets = known, MOST_LOOKED_AT, data_sets
        self._tensors: list[tuple[torch.Tensor, list[int]]] = []

    def of_tensor(self, tensor: torch.Tensor) -> Any:
        found = [content_version(tensor)]
        self._tensors.append((tensor, found))
        return id(tensor), found

    def read(self) -> None:
        sums = sums_of([each for each, _ in self._tensors])
        for (_, found), each in zip(self._tensors, sums, strict=True):
            found.append(each)

    def of(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if isinstance(value, PLAIN):
            return value
        if id(value) in self._known or isinstance(value, NOT_LOOKED_AT) or depth > DEEPEST or self._left < 0:
            return id(value)
        if isinstance(value, torch.Tensor):
            return self.of_tensor(value)
        if isinstance(value, Dataset):
            if not self._data_sets:
                return id(value)
            depth = DEEPEST  # its own attributes, and not all its samples
        if isinstance(value, nn.Module):
            tensors = (each for _, each in (*value.named_parameters(), *value.named_buffers()))
            own = tuple(self.of_tensor(each) for each in tensors if id(each) not in self._known)
            return id(value), own, tuple((name, self.of(each, depth)) for name, each in _held([value]))
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            return object()  # a generator, or one of itertools: nothing shows whether it has advanced
        if hasattr(value, "__array__") and hasattr(value, "tobytes"):
            return id(value), hash(value.tobytes()) if value.nbytes < LARGEST_ARRAY else None
        held = value if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)) else _attributes(value)
        inner = held.items() if isinstance(held, Mapping) else enumerate(held)
        looked_at = inner if len(held) <= self._left else ()
        return id(value), len(held), tuple((key, self.of(each, depth + 1)) for key, each in looked_at)


def _attributes(value: Any) -> dict[str, Any]:
    slots = (each for kind in type(value).__mro__ for each in vars(kind).get("__slots__", ()))
    own = {each: getattr(value, each) for each in slots if not each.startswith("_") and hasattr(value, each)}
    return {**getattr(value, "__dict__", {}), **own}


class Held(tuple[Any, ...]):
    """What a tensor was that a registered model holds. Nothing has changed if there was none:
    models store such tensors in their first call."""


def _held(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors that modules hold besides parameters and buffers, such as a
    count of their calls. Libraries set flags and private attributes of their own in the first call,
    and a metric is meant to change."""
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            if any(each.__module__.startswith("torchmetrics.") for each in type(module).__mro__):
                continue
            for name, value in vars(module).items():
                computed = isinstance(value, torch.Tensor) and value.grad_fn is not None  # in this forward pass
                if type(value) in (int, float, torch.Tensor) and not (computed or name.startswith("_")):
                    yield f"{_name(number)}.{path}.{name}".replace("..", "."), value


def _name(number: int) -> str:
    return f"models[{number}]" if number else "model"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    created = {name: each for name, each in after.items() if isinstance(each, Held)}
    before = {**created, **before}
    # In tuples, a NaN is equal to itself.
    return tuple(name for name in {**before, **after} if (before.get(name, MISSING),) != (after.get(name, MISSING),))

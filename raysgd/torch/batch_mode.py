"""`ElasticConfig(batch="auto")`: see what user code does in its first step, and hold the decision
that follows from it. Worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd.core.batch_mode import (
    GLOBAL,
    LINES,
    NOT_HARMFUL,
    BatchMode,
    FirstStep,
    agreed,
    decide,
    notice,
    refused,
)
from raysgd.core.outcomes import NotExact
from raysgd.torch.data.sampling import Division
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import content_version, run_after_backward
from raysgd.torch.guard import gathered_objects
from raysgd.torch.options import TrainingOptions
from raysgd.torch.schedules import steps_of
from raysgd.torch.stepping import StepPolicy
from raysgd.training.feed import Feed
from raysgd.training.position import Position
from raysgd.training.step import Step

if TYPE_CHECKING:
    from raysgd.torch.operator import TrainingOperator

logger = logging.getLogger("raysgd")

STATIC_GRAPH = "DDP's static_graph exchanges gradients in each backward pass", "leave static_graph out"
MOST_LOOKED_AT, DEEPEST, LARGEST_ARRAY = 10_000, 3, 1 << 20
CLIPS = "clip with TrainingOptions(clip_norm=...)"
MISSING = object()
PLAIN = (int, float, complex, str, bytes, bool, type(None))
# What changes in an operator without being the user's: parts, and what torch or a generator changes by itself.
NOT_LOOKED_AT = (
    type,
    FunctionType,
    MethodType,
    ModuleType,
    DataLoader,
    Dataset,
    torch.Generator,
    torch.optim.Optimizer,
)


class KeepBatch(StepPolicy):
    """Owns the mode, which is part of the position: all ranks decide from the first step that they
    commit, and agree whenever a process group has formed. Later steps are looked at only if they
    come in pieces."""

    def __init__(self, operator: TrainingOperator) -> None:
        settings = operator._settings
        self._operator, self._usual, self._asked = operator, settings.num_workers, settings.elastic.batch
        self._why = _why_not(operator, settings.options) if self._asked == "auto" else None
        self.position = Position()
        self._own_names: set[str] = set()  # the attributes that are not the user's
        self._feed: Feed | None = None
        self._looks = self._direct = False
        self._seen: FirstStep | None = None
        # While `train_batch` runs and is looked at: attributes before it, what it has called, and the schedulers' steps.
        self._before: dict[str, Any] | None = None
        self._calls: list[str] = []
        self._schedules: list[Any] = []
        self._scheduled = False
        self._own_calls: OwnCalls | None = None
        self._seen_versions: list[int] | None = None  # of the gradients, after the backward pass of a piece

    @property
    def mode(self) -> BatchMode:
        """Return what holds now. What the user has asked for, and what the settings refuse, holds
        whatever a state says."""
        found = self._known
        if self._asked == "auto":
            return found if self._why is None else self._why
        return BatchMode(self._asked, in_parts=found.in_parts and self._asked == GLOBAL, tested=found.tested)

    def starts(self) -> None:
        """Note which attributes the operator has before `setup`."""
        self._own_names = {*vars(self._operator), "_feed"}

    @property
    def possible(self) -> bool:
        """Return whether batches may come in pieces."""
        return self._asked == GLOBAL or (self._asked == "auto" and self._why is None)

    def refuse(self, reason: str, advice: str) -> None:
        """Note, in `setup`, that the batch cannot be kept."""
        if self._asked == "auto" and self._why is None:
            self._why = refused(reason, advice)

    def division(self, unit: int, *, in_pieces: bool = True) -> Division:
        """Return how a step is divided; `unit` is how many units one worker takes in it, and at
        most in a piece."""
        mode = self.mode
        if not mode.keeps_batch:
            return Division()
        return Division(
            unit * self._usual, unit if in_pieces else None, self._usual if mode.in_parts and in_pieces else None
        )

    # -- the first step, and pieces -------------------------------------------------------------------

    def on_epoch(self, feed: Feed) -> None:
        self._feed, self._seen = feed, None
        self._looks = (
            self._asked != "per_worker" and self._why is None and not self.mode.tested and self.position.parked is None
        )

    def rest(self) -> None:
        self._feed, self._looks, self._before = None, False, None
        if self._own_calls is not None:
            self._own_calls.close()
            self._own_calls = None

    def begin(self, step: Step) -> None:
        if self._looks or not step.current.whole:
            self._before, self._calls, self._direct = self._attributes(), [], False
            self._schedules, self._scheduled = self._schedule_steps(), False
        if self._looks and self._feed is not None:
            self._own_calls = OwnCalls(self._feed.collectives, self._operator._parts.wrapped)

    def ends(self, step: Step) -> None:
        """Called by the default loop after each call of `train_batch`. Raise NotExact if it has
        done something in a piece that it ought to do once in a batch."""
        if self._before is None:
            return
        attributes, now = self._before, self._attributes()
        self._look_at_schedules()
        own, self._before, self._own_calls = self._own_calls, None, None
        if own is not None:
            own.close()
        earlier = self._seen or FirstStep(())
        seen = FirstStep(
            calls=(*earlier.calls, tuple(self._calls)),
            direct=earlier.direct or self._direct,
            scheduled=earlier.scheduled or self._scheduled,
            changed=earlier.changed or _changed(attributes, now),
            together=earlier.together or (own is not None and own.made > 0),
        )
        if self._looks:
            self._seen = seen
        elif self._asked == "auto" and not (found := decide(seen)).keeps_batch:
            raise NotExact(found.reason, found.advice)

    def cleared(self, step: Step) -> None:
        self._note("zero_grad")

    def weighted(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        self._note("backward")
        if self._own_calls is not None:
            self._own_calls.stop()
        self._seen_versions = None
        if not step.current.whole and self._asked == "auto" and loss.requires_grad:
            loss.register_hook(lambda _: run_after_backward(lambda: run_after_backward(self._note_versions)))
        return loss

    def awaits(self, step: Step, optimizer: Any) -> None:
        self._note("step")
        if self._seen_versions is not None and self._versions() != self._seen_versions:
            raise NotExact("train_batch changes gradients between the backward pass and the step", CLIPS)

    def _note_versions(self) -> None:
        """Note what changes with the gradients, after the exchange, which ends in such a call,
        too."""
        self._seen_versions = self._versions()

    def _versions(self) -> list[int]:
        operator = self._operator
        parameters = [p for each in operator._parts.optimizers for p in operator._precision.parameters(each)]
        return [-1 if each.grad is None else content_version(each.grad) for each in parameters]

    def check(self, step: Step, optimizer: Any) -> None:
        self._note("step")
        if self._before is not None:
            self._look_at_schedules()

    def stepped(self) -> None:
        """Called after an optimizer's step and the user's hooks on it, which may step schedulers:
        they do that once in a batch."""
        if self._before is not None:
            self._schedules = self._schedule_steps()

    def _look_at_schedules(self) -> None:
        """Note whether user code has stepped a scheduler since they were looked at last."""
        now = self._schedule_steps()
        self._scheduled, self._schedules = self._scheduled or now != self._schedules, now

    def _schedule_steps(self) -> list[Any]:
        return [steps_of(each) for each in self._operator._parts.schedulers]

    def _note(self, call: str) -> None:
        if self._before is not None:
            self._calls.append(call)

    def direct(self, optimizer: Any) -> None:
        self._direct = True
        if self._asked == "auto" and not all(each.whole for each in self._operator._feed.step.drawn):
            raise NotExact("train_batch calls optimizer.step() itself", LINES)

    def on_step(self, step: Step) -> None:
        """Decide, when the first step is committed."""
        seen, self._seen = self._seen, None
        if not self._looks or step.outcome == "undone":
            return
        self._looks, operator, feed, before = False, self._operator, self._feed, self.mode
        assert feed is not None
        decided = refused("train_epoch has a loop of its own, which would get pieces of batches", NOT_HARMFUL)
        moving = operator._keep_buffers.are_moving
        if seen is not None:
            divided = isinstance(feed.source, PlannedSource) and feed.source.divides
            decided = decide(seen._replace(divided=divided, moving=moving))
        if self._asked == GLOBAL:
            decided = BatchMode(GLOBAL, in_parts=moving)
        merged, short = agreed([before, decided]), operator.world_size != self._usual
        self._set((agreed(_of_all(merged)) if short else merged)._replace(tested=True, logged=self._known.logged))
        if short:
            self.log_change()
            if self.mode[0::3] != before[0::3]:
                feed.reopen()

    def _set(self, mode: BatchMode) -> None:
        self.position.batch_mode = None if mode == BatchMode() else tuple(mode)

    @property
    def _known(self) -> BatchMode:
        """Return what the position says."""
        return BatchMode(*(self.position.batch_mode or ()))

    def _attributes(self) -> dict[str, Any]:
        """Return what shows whether user code changes attributes of the operator or the model."""
        operator = self._operator
        known = {id(each) for each in _registered(operator)}
        contents = Contents(known)
        attributes = {name: contents.of(value) for name, value in vars(operator).items() if name not in self._own_names}
        if self._looks:
            attributes |= _of_models(operator._parts.models)
        return attributes

    def interfered(self, found: NotExact) -> None:
        """Keep each worker's batch from now on, because user code does not allow pieces after
        all."""
        self._set(refused(found.reason, found.advice)._replace(tested=True))

    # -- all ranks together ---------------------------------------------------------------------------

    def joined(self) -> None:
        """Agree with the other ranks of a new generation, and log once what changes."""
        if self._asked != "per_worker" and self._why is None and not self._operator._rank_info.solo:
            every = _of_all(self._known)
            tested, logged = any(each.tested for each in every), any(each.logged for each in every)
            self._set(agreed(every)._replace(tested=tested, logged=logged))
        self.log_change()

    def log_change(self) -> None:
        """Log, once, that another number of workers trains, and that the batch follows it."""
        operator, mode, known = self._operator, self.mode, self._known
        other = operator.world_size != self._usual and not operator._rank_info.solo
        if self._asked == "auto" and mode.mode and not mode.keeps_batch and other and not known.logged:
            if operator.world_rank == 0:
                logger.warning("%s", notice(mode, operator.world_size, self._usual))
            self._set(known._replace(logged=True))

    def loaded(self) -> None:
        """Look at a step again, because a checkpoint was loaded, which other code may have
        written."""
        known = self._known
        self._set(known._replace(tested=False) if known.keeps_batch else BatchMode(logged=known.logged))


def _of_all(mode: BatchMode) -> list[BatchMode]:
    return [BatchMode(*each) for each in gathered_objects(tuple(mode))]


def _why_not(operator: TrainingOperator, options: TrainingOptions) -> BatchMode | None:
    """Return what the trainer's arguments and the operator's class have against pieces."""
    elastic, asks = operator._settings.elastic, "pass ElasticConfig(batch='global')"
    for applies, reason, advice in (
        (elastic.lr is not None, f"lr={elastic.lr!r} scales the learning rates for such steps", "leave lr out"),
        (operator._has_own_steps, "a LightningModule makes its steps itself", f"{asks}, which needs more memory"),
        (options.parallel is None, "with parallel=None, the operator averages the gradients", "leave parallel out"),
        (options.gradients == "ranks", "gradients='ranks' is not a mean over samples", "leave gradients out"),
        (options.precision == "apex", "Apex steps copies of the weights", "use precision='fp16' or 'bf16'"),
        (options.sync_batchnorm, "sync_batchnorm normalizes the samples of all workers together", "leave it out"),
        (bool(options.ddp_args.get("static_graph")), *STATIC_GRAPH),
        ("powersgd" in (options.hook_name or ""), "PowerSGD keeps errors of each worker", "leave comm_hook out"),
        (
            bool(operator._overrides("resized")),
            "resized() of the operator adapts to the number of workers",
            "leave resized() out, " + NOT_HARMFUL.replace("pass", "or pass"),
        ),
    ):
        if applies:
            return refused(reason, advice)
    return None


class OwnCalls:
    """Counts the collective calls that are not made by models, from now until it is stopped.
    `count` returns those of all code."""

    def __init__(self, count: Callable[[], int], models: Sequence[nn.Module]) -> None:
        self._count, self._began, self._models, self.made = count, count(), 0, 0
        self._entered = 0
        hooks = [
            (each.register_forward_pre_hook(self._enter), each.register_forward_hook(self._leave)) for each in models
        ]
        self._hooks = [hook for pair in hooks for hook in pair]

    def _enter(self, *_: Any) -> None:
        self._entered = self._count()

    def _leave(self, *_: Any) -> None:
        self._models += self._count() - self._entered

    def stop(self) -> None:
        """Stop at the first backward pass."""
        if self._hooks:
            self.made = self._count() - self._began - self._models
        self.close()

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


# -- attributes -------------------------------------------------------------------------------------------


def _registered(operator: TrainingOperator) -> Iterator[Any]:
    """Yield what raysgd and torch change in each step, or merge over pieces."""
    parts = operator._parts
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
    large objects, a part is looked at."""

    def __init__(self, known: set[int]) -> None:
        self._known, self._left = known, MOST_LOOKED_AT

    def of(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if isinstance(value, PLAIN):
            return value
        if id(value) in self._known or isinstance(value, NOT_LOOKED_AT) or depth > DEEPEST or self._left < 0:
            return id(value)
        if isinstance(value, torch.Tensor):
            return id(value), content_version(value)
        if isinstance(value, nn.Module):
            tensors = (each for _, each in (*value.named_parameters(), *value.named_buffers()))
            return id(value), tuple(
                (id(each), content_version(each)) for each in tensors if id(each) not in self._known
            )
        if hasattr(value, "__array__") and hasattr(value, "tobytes"):
            return id(value), hash(value.tobytes()) if value.nbytes < LARGEST_ARRAY else None
        if isinstance(value, Mapping):
            inner: Any = value.items()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            inner = enumerate(value)
        elif hasattr(value, "__dict__"):
            inner = vars(value).items()
        else:
            return id(value)
        size = len(value) if hasattr(value, "__len__") else 0
        looked_at = inner if size <= self._left else ()
        return id(value), size, tuple((key, self.of(each, depth + 1)) for key, each in looked_at)


def _of_models(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the numbers that modules hold besides tensors, such as a count of their calls.
    Libraries set flags and private attributes of their own in the first call."""
    return {
        f"model.{path}.{name}".replace("..", "."): value
        for model in models
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    # In tuples, a NaN is equal to itself.
    return tuple(name for name in {**before, **after} if (before.get(name, MISSING),) != (after.get(name, MISSING),))

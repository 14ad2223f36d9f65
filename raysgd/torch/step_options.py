"""What options do to a step: each is a policy that gets the `Step`. Worker.

`TrainingOperator._make_policies` lists them in the order in which they act. A new one is a class
here, or in a file of its own, and a line there.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raysgd.core.timers import Timers
from raysgd.errors import ConfigError
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.parts import Parts
from raysgd.training.feed import Feed
from raysgd.training.step import Policy, Step

logger = logging.getLogger("raysgd")

STATES = (torch.Tensor, list, int, float, type(None))  # of what an update of a metric changes
PLAIN = (int, float, str, bool)
REBOUND = (
    "train_batch has set %s, which checkpoints and new workers will not have: return it from state_dict(), or keep in self.part_state what "
    "belongs to a part of the batch"
)
CHANGED_AGAIN = (
    "train_epoch was called again for the rest of its epoch, because the workers have changed, and it has changed settings of the "
    "optimizer, such as the learning rate, again before its loop. Unless this is meant, compute them from epoch_idx"
)


class Clip(Policy):
    """Clips gradients, with `clip_value` and `clip_norm`."""

    def __init__(self, parts: Parts) -> None:
        self._norm, self._value, self._parts = parts.options.clip_norm, parts.options.clip_value, parts
        self.option = f"clip_value={self._value}" if self._norm is None else f"clip_norm={self._norm}"

    def gradients(self, step: Step, optimizer: Any) -> bool:
        parameters = self._parts.stepped_by(optimizer)
        try:
            if self._value is not None:
                nn.utils.clip_grad_value_(parameters, self._value)
            if self._norm is not None:
                nn.utils.clip_grad_norm_(parameters, self._norm)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.option} cannot clip these gradients, because torch does not do that with sparse ones: make embeddings with "
                "sparse=False, or leave the option out"
            ) from error
        return True


class Hold(Policy):
    """Lets ranks exchange gradients once in each step: in the backward pass of its last batch."""

    in_usual_steps = False

    def __init__(self, parts: Parts) -> None:
        self._parts, self._held = parts, False

    def begin(self, step: Step) -> None:
        if self._held or not step.closing:
            self._hold(not step.closing)

    def rest(self) -> None:
        if self._held:
            self._hold(False)

    def _hold(self, on: bool) -> None:
        self._held = on
        self._parts.exchange.hold(on)
        for model in self._parts.wrapped:
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = not on  # type: ignore[assignment]
            elif hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(not on)  # type: ignore[operator]


class Accumulate(Policy):
    """Makes the gradients of several batches those of one batch that holds them all, if samples
    count. The window is shorter at the end of an epoch or call."""

    def __init__(self, parts: Parts, *, exact: bool) -> None:
        self._size, self._parts, self._exact = parts.options.accumulate, parts, exact
        self.option = f"accumulate={self._size}"
        self.rest()

    def rest(self) -> None:
        self._usual, self._total = 1.0, 0.0  # samples of a usual window, and of this one
        self._witness: torch.Tensor | None = None

    def begin(self, step: Step) -> None:
        drawn, first = step.current, step.place == 0
        # Those of all ranks, if gradients are weighted by them.
        step.samples = float((drawn.rows if self._exact else None) or drawn.samples or samples_in(drawn.batch))
        if first:
            self._total, self._usual, self._witness = 0.0, step.samples * self._size, None
        if drawn.whole:
            self._total += step.samples
        if step.closing and self._total != self._usual:
            if not first and step.count is None:
                # Another rank's window can have another number of samples, so this comes before the exchange.
                self._parts.multiply_gradients(self._usual / self._total)
            self._usual = self._total
        step.share = step.samples / self._usual

    def weighted(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        if step.place > 0 and self._witness is not None and self._witness.grad is None:
            raise ConfigError(
                f"gradients were cleared in the middle of {self._size} batches that share one step: call "
                "self.zero_grad() instead of optimizer.zero_grad(); it clears them only where a window begins"
            )
        return loss

    def awaits(self, step: Step, optimizer: Any) -> None:
        """Remember a parameter that has a gradient, to notice if user code clears it before the
        window ends."""
        self._witness = next((each for each in self._parts.stepped_by(optimizer) if each.grad is not None), None)


class KeepSettings(Policy):
    """Restores the settings of optimizers, such as the learning rate, in a step that is undone, and
    in one of several batches or parts, the states of schedulers. User code or a schedule may have
    changed them, on some ranks only, and its batches come again. Warns of a `train_epoch` that
    changes settings when it is called again for the rest of an epoch."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._before: list[dict[str, Any]] = []
        self._schedules: list[Any] = []
        self._call, self._warns = -1, True  # which call of `train` has begun, and whether this process is to warn
        self._entered: list[dict[str, Any]] | None = None  # the settings when `train_epoch` was called again

    def on_epoch(self, feed: Feed) -> None:
        position, first = feed.position, feed.rank_info.world_rank == 0
        again = position.call == self._call or position.call_batches > 0
        self._call, looks = position.call, again and first and self._warns
        self._entered = settings_of(self._parts.optimizers) if looks else None

    def begin(self, step: Step) -> None:
        if step.place == 0:
            self._before = settings_of(self._parts.optimizers)
            schedulers = self._parts.schedulers
            self._schedules = [] if step.closing else [copy.deepcopy(each.state_dict()) for each in schedulers]
        if self._entered is not None:
            if self._entered != self._before:
                logger.warning(CHANGED_AGAIN)
                self._warns = False
            self._entered = None

    def on_step(self, step: Step) -> None:
        before, self._before = self._before, []
        if step.outcome == "undone":
            groups = [group for each in self._parts.optimizers for group in getattr(each, "param_groups", ())]
            for group, values in zip(groups, before, strict=False):  # user code may have added groups
                for name, value in values.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value
            for scheduler, state in zip(self._parts.schedulers, self._schedules, strict=False):
                scheduler.load_state_dict(state)


def settings_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the settings of each parameter group. This runs once for each step."""
    found = []
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            settings = {**group}
            del settings["params"]
            if isinstance(settings.get("lr"), torch.Tensor):  # which schedules fill in place
                settings["lr"] = settings["lr"].clone()
            found.append(settings)
    return found


class KeepMetrics(Policy):
    """Leaves out of the registered metric the samples that a rank repeats, because it has none left
    in a step or a part."""

    in_usual_steps = False

    def __init__(self, parts: Parts) -> None:
        self._metric: Any = parts.metrics.get("train")
        self._before: Any = None  # a copy of it

    def begin(self, step: Step) -> None:
        self._restore()
        if not step.current.fresh:
            self._before = copy.deepcopy(self._metric)

    def on_step(self, step: Step) -> None:
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            for own, kept in zip(self._metric.modules(), before.modules(), strict=True):  # user code may hold each
                vars(own).update((name, each) for name, each in vars(kept).items() if isinstance(each, STATES))


class Rebound(Policy):
    """Warns of attributes that `train_batch` has set in this process's first step, if that begins a
    call, and that nothing saves. It compares identities, of attributes that are not raysgd's."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._own_names = operator, {*vars(operator)}
        self._first, self._looks = True, False
        self._before: dict[str, Any] | None = None

    def on_epoch(self, feed: Feed) -> None:
        first, self._first = self._first, False
        self._looks = first and feed.rank_info.world_rank == 0 and not feed.position.call_batches

    def begin(self, step: Step) -> None:
        if self._looks:
            self._looks, self._before = False, {**vars(self._operator)}

    def trained(self, step: Step) -> None:
        before, self._before = self._before, None
        self.in_usual_steps = False  # from the next loop on
        if before is None:
            return
        parts = self._operator._parts
        registered = [*parts.models, *parts.wrapped, *parts.optimizers, *parts.schedulers, parts.criterion]
        known = {id(each) for each in (*before.values(), *registered) if not isinstance(each, PLAIN)}
        now = {name: value for name, value in vars(self._operator).items() if before.get(name, known) is not value}
        found = {name for name, value in now.items() if name not in self._own_names and id(value) not in known}
        saved = (self._operator.state_dict() or {}) if found else {}
        if isinstance(saved, Mapping) and (names := sorted(found - saved.keys())):
            logger.warning(REBOUND, ", ".join(f"self.{name}" for name in names))


class CallOnStep(Policy):
    """Calls an operator's `on_step` after each step that counts."""

    def __init__(self, hook: Callable[[dict[str, Any]], None]) -> None:
        self._hook = hook
        self._feed: Feed | None = None

    def on_epoch(self, feed: Feed) -> None:
        self._feed = feed

    def on_step(self, step: Step) -> None:
        if step.outcome != "undone" and self._feed is not None:
            self._feed.enter_step()
            place = {"global_step": self._feed.position.step, "skipped": step.outcome == "skipped"}
            self._hook({**self._feed.info, **place})


class ReadAhead(Policy):
    """Reads the next batch while the ranks exchange gradients, on the CPU and if no processes read
    the data. Then no code of the user may run between a backward pass and the next batch: it could
    draw random numbers, as the data set can, or change what that returns. While `timers` measure,
    each batch is read in its turn."""

    def __init__(self, parts: Parts, timers: Timers) -> None:
        self._parts, self._timers = parts, timers
        self._feed: Feed | None = None

    def on_epoch(self, feed: Feed) -> None:
        source, stepped = feed.source, (*self._parts.optimizers, *self._parts.schedulers)
        usual = all(type(each).__module__.startswith("torch.optim.") for each in stepped)
        reads_here = isinstance(source, PlannedSource) and source.loader.num_workers == 0
        if feed.rank_info.world_size > 1 and usual and reads_here and not self._timers.enabled:
            self._feed = feed

    def rest(self) -> None:
        self._feed = None

    def weighted(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        if self._feed is not None and loss.requires_grad:
            loss.register_hook(self._exchange_will_begin)
        return loss

    def _exchange_will_begin(self, gradient: torch.Tensor) -> None:
        """Called when a backward pass begins. When it ends, autograd runs the queued callbacks in
        order. DDP waits for its all-reduce in such a callback, which it queues with the last
        gradient, so this one runs during the all-reduce."""
        run_after_backward(self._read_ahead)

    def _read_ahead(self) -> None:
        if self._feed is not None:
            with torch.enable_grad():  # as in the loop
                self._feed.read_ahead()


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has: the length of the first tensor in it, or 1 if there is
    none."""
    return (batch.shape[0] if isinstance(batch, torch.Tensor) and batch.dim() else _length(batch)) or 1


def _length(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return next((length for each in part if (length := _length(each)) is not None), None)
    return None


def scaling(rule: str, workers: int, usual: int) -> float:
    """Return the factor of the learning rates for this number of workers, which is 1 for the usual
    one."""
    return float((workers / usual) ** (0.5 if rule == "sqrt" else 1.0))


class Rates(Policy):
    """Multiplies the learning rates by `factor()` for the duration of each step. Between steps,
    groups hold the unscaled rates: so schedulers and checkpoints know nothing of the factor, and
    nothing is left of it when the number of workers is the usual one again."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._own: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # the unscaled rates of an optimizer that steps

    def watch(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_post_hook"):
                raise ConfigError(
                    f"ElasticConfig(lr=...) scales the learning rates of torch optimizers, got a {type(optimizer).__name__}, which has "
                    "no register_step_post_hook: leave lr out, and scale the rate in resized(old_world_size, new_world_size)"
                )
            optimizer.register_step_pre_hook(self._scale)
            optimizer.register_step_post_hook(self._restore)

    def _scale(self, optimizer: Any, *_: Any) -> None:
        self._restore(optimizer)
        if (now := self._factor()) != 1.0:
            own = self._own[id(optimizer)] = [(each, each["lr"]) for each in optimizer.param_groups if "lr" in each]
            for group, rate in own:
                group["lr"] = rate * now

    def _restore(self, optimizer: Any, *_: Any) -> None:
        for group, rate in self._own.pop(id(optimizer), ()):
            group["lr"] = rate

    def rest(self) -> None:
        """Restore the rates of a step that has raised an error."""
        for rates in self._own.values():
            for group, rate in rates:
                group["lr"] = rate
        self._own.clear()

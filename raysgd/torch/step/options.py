"""What options do to a step: each is a policy that gets the `Step`. `order` lists them. Worker."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from raysgd.core.measures.timers import Timers
from raysgd.errors import ConfigError
from raysgd.replica.pace import Pace
from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import divisor_of, run_after_backward
from raysgd.torch.registered import Registered
from raysgd.torch.step.weights import GradientWeights

logger = logging.getLogger("raysgd")

STATES = (torch.Tensor, list, int, float, type(None))  # of what an update of a metric changes
MEASURED_EVERY_S = 0.005
DIVIDED = (
    "self.backward() got a loss that was divided by %d, as many batches as share a step: self.backward() divides it itself, so gradients "
    "are too small by that factor. Pass the loss of the batch, or ignore this if you divide by %d for another reason"
)


class Clip(Policy):
    """Clips gradients, with `clip_value` and `clip_norm`."""

    def __init__(self, registered: Registered) -> None:
        self._norm, self._value, self._registered = (
            registered.options.clip_norm,
            registered.options.clip_value,
            registered,
        )
        self.option = f"clip_value={self._value}" if self._norm is None else f"clip_norm={self._norm}"

    @classmethod
    def for_run(cls, run: Any) -> Clip | None:
        options = run.settings.options
        return None if options.clip_norm is options.clip_value is None else cls(run.registered)

    def on_gradients(self, step: Step, optimizer: Any) -> bool:
        parameters = self._registered.stepped_by(optimizer)
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

    def __init__(self, registered: Registered) -> None:
        self._registered, self._holds = registered, False

    @classmethod
    def for_run(cls, run: Any) -> Hold | None:
        settings = run.settings
        return cls(run.registered) if settings.options.accumulate > 1 or settings.in_parts else None

    def begin_part(self, step: Step) -> None:
        if self._holds or not step.closing:
            self._hold(not step.closing)

    def put_back(self, step: Step, value: None) -> None:
        """Forget the gradients of batches that will come again, which no optimizer can clear if the
        models are sharded."""
        for each in () if self._registered.shards is None else self._registered.shards.unexchanged_gradients():
            each.zero_()

    def reset(self) -> None:
        if self._holds:
            self._hold(False)

    after_loop = reset

    def _hold(self, on: bool) -> None:
        self._holds = on
        self._registered.exchange.hold(on)
        for model in self._registered.wrapped:
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = not on  # type: ignore[assignment]
            elif hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(not on)  # type: ignore[operator]


class Accumulate(Policy):
    """Makes the gradients of several batches those of one batch that holds them all, if samples
    count. The window is shorter at the end of an epoch or call."""

    def __init__(
        self, registered: Registered, weigh: GradientWeights, *, exact: bool, warn: Callable[..., None]
    ) -> None:
        self._size, self._registered, self._exact, self._warn = registered.options.accumulate, registered, exact, warn
        self._weigh = weigh
        self.option = f"accumulate={self._size}"

    @classmethod
    def for_run(cls, run: Any) -> Accumulate | None:
        settings = run.settings
        if settings.options.accumulate == 1:
            return None
        return cls(run.registered, run.weigh, exact=settings.is_exact, warn=run.warn_once)

    def begin_part(self, step: Step) -> None:
        drawn = step.current
        # Those of all ranks, if gradients are weighted by them.
        samples = float((drawn.rows if self._exact else None) or drawn.samples or samples_in(drawn.batch))
        if step.place == 0:
            step.notes[self] = Window(usual=samples * self._size)
        window: Window = step.notes[self]
        window.passed = False
        if drawn.last_part:
            window.total += samples
        step.share = samples / window.usual  # in any window: a rank does not know in each part how long it is
        if step.closing and window.total != window.usual and step.count is None:
            # Another rank's window can have another number of samples, so this comes before the exchange.
            self._weigh.correct(step, window.usual / window.total)

    def on_backward(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        window: Window = step.notes.setdefault(self, Window())  # of a step that user code makes without a batch
        if step.place > 0 and window.witness is not None and window.witness.grad is None:
            raise ConfigError(
                f"gradients were cleared in the middle of {self._size} batches that share one step: call "
                "self.zero_grad() instead of optimizer.zero_grad(); it clears them only where a window begins"
            )
        window.passed = True
        if divisor_of(loss) == self._size:
            self._warn(DIVIDED, self._size, self._size)
        return loss

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        if not (self in step.notes and step.notes[self].passed):
            raise ConfigError(
                f"{self.option} acts in self.backward(loss), and this operator calls loss.backward() itself: call "
                "self.backward(loss) before self.step(), or leave the option out"
            )

    def on_partial_step(self, step: Step, optimizer: Any) -> None:
        """Note a parameter that has a gradient, to notice if user code clears it before the window
        ends."""
        self.on_whole_step(step, optimizer)
        parameters = self._registered.stepped_by(optimizer)
        step.notes[self].witness = next((each for each in parameters if each.grad is not None), None)


@dataclass
class Window:
    """An accumulation window: samples of a usual one, and of this one, a parameter that has a
    gradient, and whether the newest batch had a backward pass."""

    usual: float = 1.0
    total: float = 0.0
    witness: torch.Tensor | None = None
    passed: bool = False


class RestoreSettings(Policy):
    """Restores the settings of optimizers, such as the learning rate, in a step that is undone, and
    in one of several batches or parts, the states of schedulers. User code or a schedule may have
    changed them, on some ranks only, and its batches come again. Each part of a batch begins with
    the settings of the first one, so `train_batch` changes them once, however many parts a rank
    has."""

    for_each_part = True

    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    @classmethod
    def for_run(cls, run: Any) -> RestoreSettings | None:
        settings, registered = run.settings, run.registered
        # Whether code besides an optimizer may set its rate.
        sets = registered.schedulers or run.acts_in_steps or run.changed("zero_grad") or run.operator._has_metrics
        return cls(registered) if settings.options.accumulate > 1 or (settings.adds_parts and sets) else None

    def kept(self, step: Step) -> tuple[list[dict[str, Any]], list[Any]]:
        schedules = () if step.closing or step.place > 0 else self._registered.schedulers
        return settings_of(self._registered.optimizers), [copy.deepcopy(each.state_dict()) for each in schedules]

    def put_back(self, step: Step, value: tuple[list[dict[str, Any]], list[Any]]) -> None:
        settings, schedules = value
        groups = [group for each in self._registered.optimizers for group in getattr(each, "param_groups", ())]
        for group, values in zip(groups, settings, strict=False):  # user code may have added groups
            for name, value_of in values.items():
                if isinstance(value_of, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value_of)
                else:
                    group[name] = value_of
        if step.outcome == "undone":
            for scheduler, state in zip(self._registered.schedulers, schedules, strict=False):
                scheduler.load_state_dict(state)


def settings_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """The settings of each parameter group. This runs once for each step."""
    result = []
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            settings = {**group}
            del settings["params"]
            if isinstance(settings.get("lr"), torch.Tensor):  # which schedules fill in place
                settings["lr"] = settings["lr"].clone()
            result.append(settings)
    return result


class RestoreMetrics(Policy):
    """Leaves out of the registered metric the samples that a rank repeats, because it has none left
    in a step or a part."""

    in_usual_steps = False

    def __init__(self, registered: Registered) -> None:
        self._metric: Any = registered.metrics.get("train")

    @classmethod
    def for_run(cls, run: Any) -> RestoreMetrics | None:
        return cls(run.registered) if "train" in run.registered.metrics else None

    def begin_part(self, step: Step) -> None:
        self.end_step(step)
        if not step.current.fresh:
            step.notes[self] = copy.deepcopy(self._metric)

    def end_step(self, step: Step) -> None:
        if (before := step.notes.pop(self, None)) is not None:
            for metric, copy in zip(self._metric.modules(), before.modules(), strict=True):  # user code may hold each
                vars(metric).update((name, each) for name, each in vars(copy).items() if isinstance(each, STATES))


class CallOnStep(Policy):
    """Calls an operator's `on_step` after each step that counts."""

    def __init__(self, hook: Callable[[dict[str, Any]], None]) -> None:
        self._hook = hook
        self._feed: Feed | None = None

    @classmethod
    def for_run(cls, run: Any) -> CallOnStep | None:
        return cls(run.operator.on_step) if run.changed("on_step") else None

    def begin_loop(self, feed: Feed) -> None:
        self._feed = feed

    def end_step(self, step: Step) -> None:
        if step.outcome != "undone" and self._feed is not None:
            self._feed.enter_step()
            place = {"global_step": self._feed.position.step, "skipped": step.outcome == "skipped"}
            self._hook({**self._feed.info, **place})


class ReadAhead(Policy):
    """Reads the next batch before the current step is made. Then no code of the user may run
    between a backward pass and the next batch: it could draw random numbers, as the data set can,
    or change what that returns. It does not do that while `timers` measure."""

    def __init__(self, registered: Registered, timers: Timers) -> None:
        self._registered, self._timers = registered, timers
        self._feed: Feed | None = None

    @staticmethod
    def is_wanted(run: Any) -> bool:
        options = run.settings.options
        return options.read_ahead and options.accumulate == 1 and not run.acts_in_steps

    def begin_loop(self, feed: Feed) -> None:
        stepped = (*self._registered.optimizers, *self._registered.schedulers)
        usual = all(type(each).__module__.startswith("torch.optim.") for each in stepped)
        if usual and not self._timers.enabled and self._suits(feed):
            self._feed = feed

    def _suits(self, feed: Feed) -> bool:
        raise NotImplementedError

    def reset(self) -> None:
        self._feed = None


class DuringExchange(ReadAhead):
    """On the CPU, with DDP: measures for how long steps wait for the other ranks' gradients. While
    they are exchanged, the next batch is read if this policy `reads`, and no processes do."""

    def __init__(self, registered: Registered, timers: Timers, pace: Pace, *, reads: bool) -> None:
        super().__init__(registered, timers)
        self._pace, self._reads, self._several = pace, reads, False
        self._begun, self._measures, self._measured_at = -1, False, 0.0  # the running step
        self._counts, self._skipped = 1, 0  # how many steps the measured one counts for, and those since
        self._asked = self._waited = self._arrived = self._read = 0.0

    @classmethod
    def for_run(cls, run: Any) -> DuringExchange | None:
        settings = run.settings
        if run.device.type != "cpu" or not (settings.distributed and settings.wrap_ddp):
            return None
        return cls(run.registered, run.operator.timers, run.pace, reads=cls.is_wanted(run))

    def begin_loop(self, feed: Feed) -> None:
        self._several, self._counts, self._skipped = feed.rank_info.world_size > 1, 1, 0
        super().begin_loop(feed)

    def _suits(self, feed: Feed) -> bool:
        source = feed.source
        return self._reads and self._several and isinstance(source, PlannedSource) and source.loader.num_workers == 0

    def on_backward(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        if self._several and loss.requires_grad:
            self._asked = perf_counter()
            if self._feed is not None or (step.closing and self._is_measured()):
                loss.register_hook(self._exchange_will_begin)
        return loss

    def _is_measured(self) -> bool:
        """Return whether to measure the running step: of fast ones only some, because the hook
        takes 10 us, where no batch is read in it."""
        if (begun := self._registered.control.begun) != self._begun:
            self._begun, self._skipped = begun, self._skipped + 1
            self._measures = self._asked - self._measured_at >= MEASURED_EVERY_S
            if self._measures:
                self._measured_at, self._counts, self._skipped = self._asked, self._skipped, 0
        return self._measures

    def _exchange_will_begin(self, gradient: torch.Tensor) -> None:
        """Called when a backward pass begins, after counts have travelled, if they do. When it
        ends, autograd runs the queued callbacks in order. DDP waits for its all-reduce in such a
        callback, which it queues with the last gradient: `_arrive` runs during the all-reduce, and
        what that queues runs after it."""
        self._waited = perf_counter() - self._asked
        run_after_backward(self._arrive)

    def _arrive(self) -> None:
        self._arrived = perf_counter()
        if self._feed is not None:
            with torch.enable_grad():  # as in the loop
                self._feed.read_ahead()
        self._read = perf_counter()
        run_after_backward(self._exchanged)

    def _exchanged(self) -> None:
        read, waited = self._read - self._arrived, perf_counter() - self._read
        self._pace.wait_s += (self._waited + waited) * self._counts
        self._pace.exchanges += 1
        if self._feed is not None:
            self._feed.waited_s += read
            if waited > read / 10:  # otherwise the exchange had ended before, it is not known when
                self._feed.hidden_s += read


class ReadAfterLaunch(ReadAhead):
    """On a GPU: when the backward pass is launched, before anything waits for it. Comes before the
    policies that wait."""

    @classmethod
    def for_run(cls, run: Any) -> ReadAfterLaunch | None:
        on_gpu = run.device.type != "cpu"
        return cls(run.registered, run.operator.timers) if on_gpu and cls.is_wanted(run) else None

    def _suits(self, feed: Feed) -> bool:
        if suits := isinstance(feed.source, PlannedSource):  # which knows that there is a next batch
            feed.ahead = False
        return suits

    def on_partial_step(self, step: Step, optimizer: Any) -> None:
        if self._feed is not None:
            with torch.enable_grad():  # as in the loop
                self._feed.read_ahead()

    on_whole_step = on_partial_step


def samples_in(batch: Any) -> int:
    """Count the samples of a batch: the length of the first tensor in it, or 1 if there is none."""
    return (batch.shape[0] if isinstance(batch, torch.Tensor) and batch.dim() else _length(batch)) or 1


def _length(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return next((length for each in part if (length := _length(each)) is not None), None)
    return None

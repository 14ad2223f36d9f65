"""What the operators of torch and TensorFlow have in common: settings, the default validation,
counting. Worker."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

from raysgd.config import at_least
from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.average_meters import AverageMeterCollection
from raysgd.core.metrics import OWN_NAMES, refuse_own_names
from raysgd.core.ranks import RankInfo
from raysgd.core.sampling_plan import optimizer_steps
from raysgd.core.timers import Timers
from raysgd.errors import ConfigError, MissingPartError, shown
from raysgd.training.feed import Feed, NoFeed
from raysgd.training.settings import ReplicaSettings
from raysgd.training.step import Policies, Step

logger = logging.getLogger("raysgd")

SEVERAL = (
    "raysgd averages single numbers only, and these metrics have several: %s. The result has what rank 0 returned for its last batch. "
    "Return each number under a name of its own, or register a TorchMetrics object"
)
MIXED = "these metrics were no numbers in some batches, which their means leave out: %s. Return a number, or None, in each batch"
NO_SAMPLES = (
    "num_samples was 0 in all batches of rank 0. So none of them counts in the means. Return how many samples a batch has, or leave "
    "num_samples out"
)
RANK_IN_SETUP = (
    "setup reads self.world_rank. It runs once in each process, and ranks change when workers fail: what only rank 0 has, such as a "
    "writer, would be missing on its successor. Read self.is_first at the time of use, create the object on all ranks, or use a callback"
)


@dataclass
class RegisteredParts:
    """What `register` received. Owned by one operator."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    criterion: Any = None
    registered: bool = False

    @staticmethod
    def is_single(value: Any) -> bool:
        """Return whether a value passed to `register` is one object, and not a container of
        objects."""
        return not isinstance(value, (list, tuple))

    def as_list(self, value: Any) -> list[Any]:
        if value is None:
            return []
        return [value] if self.is_single(value) else list(value)

    def like(self, given: Any, values: list[Any]) -> Any:
        """Return `values` in the container in which `given` was passed: a single object, a tuple or
        a list."""
        if self.is_single(given):
            return values[0]
        return tuple(values) if isinstance(given, tuple) else list(values)


def each_loader(name: str, given: Any) -> list[tuple[str, Any]]:
    """Return the loader that was registered, or each of several for validations or tests, with its
    name in errors."""
    if not isinstance(given, Mapping) or name.startswith("train"):
        return [(name, given)]
    if not given or any(not (isinstance(key, str) and key) or data is None for key, data in given.items()):
        raise ConfigError(f"{name} must be data, or a dict from names to data, got {shown(given)}")
    return [(f"{name}[{key!r}]", data) for key, data in given.items()]


class Schedule(Protocol):
    """Steps a learning rate's schedule in the default loop."""

    def end(self, *, failed: bool = False) -> None:
        """Called after each part of a batch; `failed` is whether `train_batch` has raised an
        error."""

    def end_epoch(self) -> None:
        """Called when the loop has ended."""


class OperatorBase:
    """The base of the operator classes that users extend, `raysgd.torch.TrainingOperator` and
    `raysgd.tf.TrainingOperator`.

    The loop around it, in every worker:

        operator.setup(config)                          once, when the process group is up
        for each trainer.train():
            operator.train_epoch(iterator, info)        until the epoch ends, or `num_steps` batches are done
                operator.train_batch(batch, batch_info) once for each batch; its numbers are averaged
        for each trainer.validate() or trainer.test():
            operator.validate(iterator, info)
                operator.validate_batch(batch, batch_info)    or operator.test_batch

    It owns the registered parts, the timers and its `RankInfo`, which the replica replaces when the
    group changes. The `__init__` of a subclass calls `setup` at its end.
    """

    _parts: Any
    _validation_prefix = "val_"  # of metrics that the operator does not name itself
    _meter_class = AverageMeterCollection

    def __init__(self, config: dict[str, Any] | None, settings: ReplicaSettings, rank_info: RankInfo | None) -> None:
        self._config: dict[str, Any] = {} if config is None else config
        self._settings = settings
        self._rank_info = rank_info or RankInfo()
        self._meter = self._meter_class()
        self._policies = Policies()  # which take part in each step
        self._feed: Feed | NoFeed = NoFeed()  # of the running loop, with the running step; its replica sets it
        self._complete_for: set[str] = set()
        self._explained: set[str] = set()  # warnings that were logged
        self.timers = Timers()
        self.global_step = 0
        self._in_setup = False
        self._testing = False  # whether `validate` runs for a test
        self._epochs_before: Callable[[], int] = lambda: 0  # how many epochs were begun before the current one
        # Of the running loop, if there is one: how many epochs it has, and how many batches each call of `train`.
        self._run_length: tuple[int | None, int | None] = (None, None)
        self._last_epoch = 0  # with which the running call of `train` ends
        self._planned_steps: int | None = None  # the most that `total_steps` has returned

    # -- what users override --------------------------------------------------------------------------

    def setup(self, config: dict[str, Any]) -> None:
        """Create the parts from the trainer's `config`, and register them with `self.register` and
        `self.register_data`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method setup(self, config): define it, make the model, optimizer and data there, "
            "and call self.register(...) and self.register_data(...)"
        )

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train one pass over `iterator`, and return what to report. Ends early when the group of
        workers changes.

        `info` is what was passed to `train`, with `epoch_idx`, `num_steps` the number of batches if
        it is limited, `epoch_idx` the epoch."""
        common = {**(info or {}), **self._epoch_info(num_steps), "epoch_idx": epoch_idx}
        self._meter, feed, batch_idx = self._meter_class(), self._feed, 0
        named = "batch_info" in signature(self.train_batch).parameters
        schedule = self._begin_epoch()
        unchanged = iterator is feed.batches  # one of a subclass may repeat, merge, keep or leave out batches
        for batch in iterator:
            step, batch_idx = feed.step, max(batch_idx, feed.position.call_batches)  # also after a change of the group
            current = step.current
            place: dict[str, Any] = {
                "part": current.part,
                "last_part": current.whole,
                "epoch_batch": feed.position.epoch_batches + step.batches - current.whole,
            }
            if current.indices is not None:
                place["rows"] = current.indices
            batch_info = {"batch_idx": batch_idx, "global_step": self.global_step, **place, **common}
            try:
                metrics = (
                    self.train_batch(batch, batch_info=batch_info) if named else self.train_batch(batch, batch_info)
                )
                for policy in step.policies.before_commit if step.closing else ():
                    policy(step)  # before anything counts the batch
            except BaseException:
                if schedule is not None:
                    schedule.end(failed=True)  # a peer failed, or the user's code raised an error
                raise
            for policy in step.policies.trained if unchanged else ():
                policy(step)
            if schedule is not None:
                schedule.end()
            self._count(step, metrics, batch=batch)
            if step.current.whole:  # otherwise, another part of the same batch follows
                self.global_step += 1
                batch_idx += 1
        if schedule is not None:
            schedule.end_epoch()
        return self._summary()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train one step on one batch, and return its metrics."""
        raise NotImplementedError

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over `val_iterator`, without gradients, and return what to report.
        `info` is what was passed to `validate`."""
        self._meter = self._meter_class()
        name = "test_batch" if self._testing else "validate_batch"
        method = getattr(self, name)
        batch_idx = 0
        for batch in val_iterator:
            step = self._feed.step
            metrics = method(batch, {"batch_idx": batch_idx, **(info or {})})
            self._count(step, metrics, name, batch)
            batch_idx += step.current.whole
        return self._summary()

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of one batch."""
        raise NotImplementedError

    def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of one `batch` of `trainer.test()`, with the same `batch_info`. By
        default, these are the ones of `validate_batch`; a name that begins with `val_` begins with
        `test_` in the result."""
        return self.validate_batch(batch, batch_info)

    def state_dict(self) -> Any:
        """Return extra state of your own for checkpoints: plain values, tensors or arrays, and
        containers of them."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `state_dict` returned."""

    def resized(self, old_world_size: int, new_world_size: int) -> None:
        """Called on every rank after the number of workers has changed from `old_world_size` to
        `new_world_size`, for example to rescale a learning rate."""

    def on_preemption_notice(self, deadline_s: float | None) -> None:
        """Called between two batches on a rank whose machine will be stopped, in `deadline_s`
        seconds (None: unknown), for example to flush a log. The other ranks wait, so it must be
        quick and make no collective call."""

    # -- what operators can read ----------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def world_size(self) -> int:
        """Return the current number of workers. It changes when workers fail or join."""
        return self._rank_info.world_size

    @property
    def world_rank(self) -> int:
        if self._in_setup and self._settings.num_workers > 1 and not self._rank_info.solo:
            self._warn_once(RANK_IN_SETUP)
        return self._rank_info.world_rank

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0 now. If rank 0 fails, another worker becomes it."""
        return self.world_rank == 0

    @property
    def local_rank(self) -> int:
        """Return the rank among the workers of this machine."""
        return self._rank_info.local_rank

    @property
    def use_gpu(self) -> bool:
        return self._settings.use_gpu

    @property
    def use_tqdm(self) -> bool:
        return self._settings.use_tqdm

    def total_steps(self, epochs: int | None = None, num_steps: int | None = None) -> int:
        """Return how many steps an optimizer makes in a run, for a learning rate's schedule: with
        one call of `train` for each of these epochs, or one of `train(num_steps)`.

        In `setup`, pass `epochs`, and call `register_data` first. During `fit` or a loop over
        `epochs()`, the default is that loop. The number is that of a group with all workers,
        `num_workers`. It stays right if some of them fail, unless `ElasticConfig(batch=...)` is
        "per_worker".
        """
        if epochs is None:
            epochs, num_steps = self._run_length[0], self._run_length[1] if num_steps is None else num_steps
        if epochs is None:
            raise ConfigError(
                "total_steps() does not know how many epochs the run has, because setup() runs before fit() or epochs() is "
                "called: pass total_steps(epochs=...), for example a number in the trainer's config"
            )
        at_least("epochs", epochs, 0, whole=True)
        if self._batches_per_step > 1 and getattr(self, "scheduler_step_freq", None) == "batch":
            raise ConfigError(
                "total_steps() counts optimizer steps, but with scheduler_step_freq='batch' the schedulers step after each of "
                f"the {self._batches_per_step} batches of an optimizer step: pass scheduler_step_freq='step', or 'manual' and "
                "step them yourself, after a self.step() that returns True"
            )
        if num_steps is not None:
            at_least("num_steps", num_steps, 1, whole=True)
        batches = self._batches_per_epoch(self._settings.num_workers)
        if batches == 0 or (batches is None and num_steps is None):
            raise ConfigError(
                f"total_steps() cannot count the steps of an epoch, because the training data "
                f"{'has no batch' if batches == 0 else 'has no length that is known in advance'}: pass "
                "total_steps(epochs=..., num_steps=...), and train with the same num_steps"
            )
        steps = optimizer_steps(epochs, batches=batches, num_steps=num_steps, window=self._batches_per_step)
        self._planned_steps = max(steps, self._planned_steps or 0)  # a call for a warm-up returns fewer
        return steps

    # -- for the default methods ----------------------------------------------------------------------

    def _set_up(self) -> None:
        self._in_setup = True
        self.setup(self._config)
        self._in_setup = False

    @property
    def _batches_per_step(self) -> int:
        """Return how many batches share an optimizer step."""
        return 1

    @abstractmethod  # without ABC, whose metaclass a user's other base class may not have
    def _batches_per_epoch(self, workers: int) -> int | None:
        """Return how many batches an epoch has for each of these workers, None if that is not known
        in advance."""

    def _train_data(self, name: str) -> Any:
        """Return the registered training data for `total_steps`."""
        data = getattr(self._parts, name)
        if data is None:
            raise ConfigError(
                f"total_steps() needs the training data: call self.register_data({name}=...) before it, in setup"
            )
        return data

    def _validating(self) -> AbstractContextManager[Any]:
        """Return a context for a validation, in which no rank waits for another one."""
        return nullcontext()

    def _samples_in(self, batch: Any) -> float:
        """Return how many samples a batch has, for a method that does not return `num_samples`."""
        return 1

    def _begin_epoch(self) -> Schedule | None:
        """Prepare for a loop over an epoch. Return what steps the schedule in it, if there is
        one."""
        return None

    def _epoch_info(self, num_steps: int | None) -> Mapping[str, Any]:
        """Return what `batch_info` has in addition."""
        return {}

    def _count(self, step: Step, metrics: Any, of: str = "train_batch", batch: Any = None) -> None:
        """Add one batch's metrics; those of batches and parts that share a step, together with the
        last one, because after a failure all of them are processed again. A batch that is repeated
        only to take part in a step has weight 0."""
        if not isinstance(metrics, dict):
            raise TypeError(f"{type(self).__name__}.{of} must return a dict of metrics, got {shown(metrics)}")
        if not OWN_NAMES.isdisjoint(metrics):
            refuse_own_names(metrics, of=f"{type(self).__name__}.{of}")
        values, meter = dict(metrics), self._meter
        samples = values.pop(NUM_SAMPLES) if NUM_SAMPLES in values else self._samples_in(batch)
        weight = samples if step.current.fresh else 0
        meter.drawn += (step.current.samples or 0) if step.current.fresh else 0
        try:
            if step.closing and not step.metrics:
                meter.update(values, n=weight)
                return
            step.metrics.append((values, weight, step.current.whole))
            if not step.closing:
                return
            parts: list[Any] = []
            for values, counts, whole in step.metrics:
                parts.append((values, counts))
                if whole:
                    meter.update_in_parts(parts)
                    parts = []
            step.metrics.clear()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{type(self).__name__}.{of} returned an invalid metric: {error}") from None

    def _summary(self) -> dict[str, Any]:
        """Return what the loop has measured. Warn of what cannot be averaged."""
        found = dict(self._meter.summary())
        shapes = {name: getattr(value, "shape", ()) for name, value in found.items()}
        several = [name for name, shape in shapes.items() if isinstance(shape, tuple) and math.prod(shape) != 1]
        if mixed := self._meter.mixed:
            self._warn_once(MIXED, ", ".join(mixed))
        if several:
            self._warn_once(SEVERAL, ", ".join(several))
        if found[BATCH_COUNT] and not found[NUM_SAMPLES]:
            self._warn_once(NO_SAMPLES)
        return found

    def _warn_once(self, text: str, *values: Any) -> None:
        """Log a warning of this kind, on the first rank and for the first time only."""
        if self._rank_info.world_rank == 0 and text not in self._explained:
            self._explained.add(text)
            logger.warning(text, *values)

    def _need(self, method: str, *names: str) -> None:
        """Raise an error unless `setup` has set the attributes that the default `method` uses."""
        if method in self._complete_for:
            return
        for name in names:
            if not hasattr(self, name):
                raise MissingPartError(
                    f"the default {method} needs self.{name}: set it in setup "
                    f"(self.model, self.optimizer, self.criterion = self.register(...)), or override {method}"
                )
        self._complete_for.add(method)

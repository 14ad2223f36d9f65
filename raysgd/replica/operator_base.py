"""What the operators of torch and TensorFlow have in common: settings, the default validation,
counting. Worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from raysgd.config import at_least
from raysgd.constants import NUM_SAMPLES
from raysgd.core.decisions.sampling_plan import optimizer_steps
from raysgd.core.measures.average_meters import copy_metric
from raysgd.core.measures.metrics import OWN_NAMES, refuse_own_names
from raysgd.core.measures.timers import Timers
from raysgd.errors import ConfigError, MissingPartError, close_to, shown
from raysgd.replica.internals import Internals
from raysgd.replica.settings import ReplicaSettings
from raysgd.replica.steps.step import Step

COUNTS = (
    "these metrics are pairs of whole numbers, with the number of samples second: %s. raysgd reads a pair as (mean, weight), so the "
    "result is the weighted mean of the first numbers. For the share of correct samples, return correct / total"
)
OTHER_SAMPLES = (
    "%s returned num_samples=%d for a batch of %d samples. Means weigh it by the first number, gradients by the second. Return the "
    "second. For a loss over tokens, pass self.backward(loss, count=tokens), and return (loss, tokens)"
)
RANK_IN_SETUP = (
    "setup reads self.world_rank. setup runs once in each process, but ranks change when workers fail. What only rank 0 makes, such as "
    "a writer, is then missing on its successor. Read self.is_first at the time of use, create the object on all ranks, or use a "
    "callback. Make the same data on all ranks, because raysgd divides registered data"
)
OTHER_NAME = (
    "%s names a metric that the first batch does not have. If no later batch has it either, this has no effect, or an error ends "
    "training after a validation. Did you mean %r?"
)


@dataclass
class RegisteredBase:
    """What `register` received. Owned by one operator."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    criterion: Any = None
    is_complete: bool = False  # whether `register` was called

    @staticmethod
    def is_single(value: Any) -> bool:
        """Whether a value passed to `register` is one object, and not a container of objects."""
        return not isinstance(value, (list, tuple))

    def as_list(self, value: Any) -> list[Any]:
        if value is None:
            return []
        return [value] if self.is_single(value) else list(value)

    def like(self, original: Any, values: list[Any]) -> Any:
        """Put `values` into the container in which `original` was passed: a single object, a tuple
        or a list."""
        if self.is_single(original):
            return values[0]
        return tuple(values) if isinstance(original, tuple) else list(values)


def each_loader(name: str, value: Any) -> list[tuple[str, Any]]:
    """The loader that was registered, or each of several for validations or tests, with its name in
    errors."""
    if not isinstance(value, Mapping) or name.startswith("train"):
        return [(name, value)]
    if not value or any(not (isinstance(key, str) and key) or data is None for key, data in value.items()):
        raise ConfigError(f"{name} must be data, or a dict from names to data, got {shown(value)}")
    return [(f"{name}[{key!r}]", data) for key, data in value.items()]


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

    It owns the timers, and the `Internals` that its replica shares. The `__init__` of a subclass
    calls `setup` at its end.
    """

    _settings: ReplicaSettings
    _internals: Internals

    def __init__(self, config: dict[str, Any] | None, internals: Internals) -> None:
        self._config: dict[str, Any] = {} if config is None else config
        self._internals = internals
        self._settings, self._registered = internals.settings, internals.registered
        self._complete_for: set[str] = set()
        self.timers = Timers()
        self.global_step = 0
        self._in_setup = False

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

        `info` is what was passed to `train`; `num_steps` the number of batches, if it is limited;
        `epoch_idx` the epoch, which `info` has, too."""
        feed, schedule = self._internals.feed, self._begin_epoch()
        common = {**(info or {}), **self._epoch_info(num_steps), "epoch_idx": epoch_idx}
        train_batch, by_name = self.train_batch, "batch_info" in signature(self.train_batch).parameters
        self._internals.begin_metrics()
        batch_idx, count = 0, self.global_step
        for batch in iterator:  # a batch or a part of one: `StepLoop` ends its step when the next one is asked for
            step, drawn, position = feed.step, feed.step.current, feed.position
            batch_idx = max(batch_idx, position.call_batches)  # after a change of the group, the loop begins again
            batch_info = feed.make_info(
                batch_idx=batch_idx,
                global_step=count,
                epoch_batch=position.epoch_batches + step.batches - drawn.last_part,
                part=drawn.part,
                last_part=drawn.last_part,
            )
            if drawn.indices is not None:
                batch_info["rows"] = drawn.indices
            batch_info |= common
            try:
                metrics = train_batch(batch, batch_info=batch_info) if by_name else train_batch(batch, batch_info)
                if step.error is not None:  # before anything counts the batch
                    raise step.error
                for check in step.policies.before_commit if step.closing else ():
                    check(step)  # `StepLoop` does it, too, but later than the schedule
            except BaseException:
                if schedule is not None:
                    schedule.end_part(failed=True)  # a peer failed, or the user's code raised an error
                raise
            for policy in step.policies.after_batch if iterator is feed.batches else ():  # others may repeat batches
                policy(step)
            if schedule is not None:
                schedule.end_part()
            self._count(step, metrics, batch=batch)
            batch_idx += drawn.last_part  # otherwise, another part of the same batch follows
            self.global_step = count = count + drawn.last_part
        if schedule is not None:
            schedule.end_epoch()
        return self._summary()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train one step on one batch, and return its metrics."""
        raise NotImplementedError

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over `val_iterator`, without gradients, and return what to report.
        `info` is what was passed to `validate`."""
        internals = self._internals
        internals.begin_metrics()
        name = "test_batch" if internals.testing else "validate_batch"
        method = getattr(self, name)
        batch_idx = 0
        for batch in val_iterator:
            step = internals.feed.step
            metrics = method(batch, {"batch_idx": batch_idx, **(info or {})})
            self._count(step, metrics, name, batch)
            batch_idx += step.current.last_part
        return self._summary()

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Compute the metrics of one batch."""
        raise NotImplementedError

    def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Compute the metrics of one `batch` of `trainer.test()`, with the same `batch_info`. By
        default, these are the ones of `validate_batch`; a name that begins with `val_` begins with
        `test_` in the result."""
        return self.validate_batch(batch, batch_info)

    def state_dict(self) -> Any:
        """Extra state of your own for checkpoints: plain values, tensors or arrays, and containers
        of them."""
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
        """The current number of workers. It changes when workers fail or join."""
        self._internals.ranks_read.add("world_size")
        return self._internals.rank_info.world_size

    @property
    def world_rank(self) -> int:
        self._internals.ranks_read.add("world_rank")
        return self._rank()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 now. If rank 0 fails, another worker becomes it."""
        return self._rank() == 0

    def _rank(self) -> int:
        if self._in_setup and self._settings.num_workers > 1 and not self._internals.rank_info.solo:
            self._internals.warn_once(RANK_IN_SETUP)
        return self._internals.rank_info.world_rank

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine."""
        return self._internals.rank_info.local_rank

    @property
    def use_gpu(self) -> bool:
        return self._settings.use_gpu

    @property
    def use_tqdm(self) -> bool:
        return self._settings.use_tqdm

    def total_steps(self, epochs: int | None = None, num_steps: int | None = None) -> int:
        """Count the steps that an optimizer makes in a run, for a learning rate's schedule: with
        one call of `train` for each of these epochs, or one of `train(num_steps)`.

        In `setup`, pass `epochs`, and call `register_data` first. During `fit` or a loop over
        `epochs()`, the default is that loop. The number is that of a group with all workers,
        `num_workers`. It stays right if some of them fail, unless `ElasticConfig(batch=...)` is
        "per_worker".
        """
        internals = self._internals
        if epochs is None:
            epochs, num_steps = internals.epochs, internals.num_steps if num_steps is None else num_steps
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
        internals.planned_steps = max(steps, internals.planned_steps or 0)  # a call for a warm-up returns fewer
        return steps

    # -- for the default methods ----------------------------------------------------------------------

    def _change_with(self, function: Callable[[Any], Any]) -> Any:
        """Call a function of `apply_all_operators`."""
        return function(self)

    def _set_up(self) -> None:
        self._in_setup = True
        self.setup(self._config)
        self._in_setup = False

    @property
    def _batches_per_step(self) -> int:
        return 1

    @abstractmethod  # without ABC, whose metaclass a user's other base class may not have
    def _batches_per_epoch(self, workers: int) -> int | None:
        """How many batches an epoch has for each of these workers, None if that is not known in
        advance."""

    def _train_data(self, name: str) -> Any:
        """The registered training data for `total_steps`."""
        data = getattr(self._registered, name)
        if data is None:
            raise ConfigError(
                f"total_steps() needs the training data: call self.register_data({name}=...) before it, in setup"
            )
        return data

    def _samples_in(self, batch: Any) -> float:
        """Count the samples of a batch, for a method that does not return `num_samples`."""
        raise NotImplementedError

    def _begin_epoch(self) -> Any:
        """Prepare for a loop over an epoch. Return what steps the learning rates' schedules in it,
        if there are some (`LoopSchedule`)."""
        return None

    def _epoch_info(self, num_steps: int | None) -> Mapping[str, Any]:
        """What `batch_info` has in addition."""
        return {}

    def _count(self, step: Step, metrics: Any, of: str = "train_batch", batch: Any = None) -> None:
        """Add one batch's metrics; those of batches and parts that share a step, together with the
        last one, because after a failure all of them are processed again. A batch that is repeated
        only to take part in a step has weight 0."""
        if not isinstance(metrics, dict):
            raise TypeError(f"{type(self).__name__}.{of} must return a dict of metrics, got {shown(metrics)}")
        if not OWN_NAMES.isdisjoint(metrics):
            refuse_own_names(metrics, of=f"{type(self).__name__}.{of}")
        if self._settings.wanted and not self._internals.meter.batch_count:
            self._check_wanted(of, metrics)
        values, meter = dict(metrics), self._internals.meter
        samples = values.pop(NUM_SAMPLES) if NUM_SAMPLES in values else self._samples_in(batch)
        known = step.current.samples
        other = type(samples) is int and known and samples != known
        if other and of == "train_batch" and step.count is None and self._settings.is_exact:
            self._internals.warn_once(OTHER_SAMPLES, f"{type(self).__name__}.{of}", samples, known)
        weight = samples if step.current.fresh else 0
        try:
            if step.closing and not step.metrics:
                meter.update(values, n=weight)
                return
            if not step.closing:
                values = {name: copy_metric(value) for name, value in values.items()}
            step.metrics.append((values, weight, step.current.last_part))
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

    def _check_wanted(self, of: str, names: Collection[str]) -> None:
        """Warn if an argument of the trainer seems to mean one of these metrics, which the first
        batch of a default loop has. It is no error, because a later batch may have the other."""
        loop, begin = ("train_epoch", "train_") if of == "train_batch" else ("validate", "val_")
        default = getattr(type(self), loop).__module__ in (__name__, "raysgd.torch.operator")
        several = begin == "val_" and isinstance(
            self._registered.validation_loader, Mapping
        )  # their names are in the metrics
        if not default or several or of == "test_batch" or self._registered.metrics:
            return
        for name, argument in self._settings.wanted.items():
            bare = name.removeprefix("last_")
            if bare.startswith(begin) and bare not in names and (meant := close_to(bare, names)):
                self._internals.warn_once(OTHER_NAME, argument, meant)

    def _summary(self) -> dict[str, Any]:
        """Collect what the loop has measured. Warn of means that users may misread."""
        meter = self._internals.meter
        if meter.counts:
            self._internals.warn_once(COUNTS, ", ".join(sorted(meter.counts)))
        return dict(meter.summary())

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

"""The class that users of PyTorch extend: parts of training, and what a batch does. Worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, Literal

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from raysgd.constants import NUM_SAMPLES, NUM_STEPS, USE_FP16, WEIGHT
from raysgd.core import offers
from raysgd.core.ranks import RankInfo
from raysgd.data.sample_seeds import seeded_for
from raysgd.errors import ConfigError, MissingPartError, shown
from raysgd.ray_data.columns import RayData
from raysgd.replica.steps.step import Policies
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.data.sampling import batches_per_epoch
from raysgd.torch.internals import TorchInternals
from raysgd.torch.meters import accuracy
from raysgd.torch.registered import Registered, move, set_modes
from raysgd.torch.registering import Registering
from raysgd.torch.settings import TorchSettings
from raysgd.torch.step.attributes import WatchAttributes
from raysgd.torch.step.options import samples_in
from raysgd.torch.step.order import policies_for
from raysgd.torch.step.precision import make_precision
from raysgd.torch.step.weights import Counted, counted_by_criterion, counted_by_model

LABELS = "labels"  # in a batch that is a dictionary, as models of transformers take it
NO_LOSS = (
    "the default batch methods need self.criterion, or a model that takes the complete batch and returns its own loss: set it in setup "
    "(self.model, self.optimizer, self.criterion = self.register(...)), or let the model return an object or a dict with `loss`, or a "
    "tuple with one single number, such as (logits, loss), or override train_batch and validate_batch"
)


class TrainingOperator(Registering):
    """Defines the model and the data, and what to do with a batch, in an epoch and in a validation.

        class Digits(TrainingOperator):
            def setup(self, config):
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss())
                self.register_data(train_loader=..., validation_loader=...)

    Override any of its methods; `OperatorBase` shows the loop that calls them. An operator never
    deals with processes, checkpoints or worker failures.
    """

    model: Any
    optimizer: Any
    criterion: Any
    _settings: TorchSettings

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        settings: TorchSettings | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        settings = settings or TorchSettings()
        self._device = torch.device("cuda:0" if settings.use_gpu else "cpu")
        precision = make_precision(settings.options.precision or "fp32", self._device)
        registered = Registered(options=settings.options, exchange=settings.exchange(), precision=precision)
        super().__init__(config, internals := TorchInternals(self, settings, rank_info, registered))
        hook: Any = type(self).metrics  # which can be an attribute of older code, and not the hook
        self._metrics_hook = hook if callable(hook) else TrainingOperator.metrics
        self._has_metrics = self._metrics_hook is not TrainingOperator.metrics
        internals.attributes = WatchAttributes(self, registered)  # those that follow are of user code
        self._set_up()
        registered.end_setup()
        self._check_attributes()
        internals.use(Policies(self._make_policies()))
        self._note_steps(registered.optimizers)  # after the hooks of the user

    def _make_policies(self) -> list[Policy]:
        return policies_for(self._internals)

    def _check_attributes(self) -> None:
        """Refuse what `setup` has set and training cannot use, and warn of mistakes."""
        self._refuse_taken_names()
        self._warn_of_eval_mode()
        self._warn_of_schedulers()
        if self._registered.is_complete and type(self).train_epoch is TrainingOperator.train_epoch:
            self._own_schedulers()  # raises ConfigError for what it cannot step

    def _refuse_taken_names(self) -> None:
        """Raise ConfigError if `setup` has replaced a method by a value. (Older code has an
        attribute `metrics`, which replaces nothing.)"""
        for name, value in vars(self).items():
            is_method = name != "metrics" and callable(getattr(TrainingOperator, name, None))
            if is_method and not callable(value):
                raise ConfigError(
                    f"setup sets self.{name} to {shown(value, 40)}, and {name} is a method of TrainingOperator, which training calls: "
                    "give the attribute another name"
                )
            if name in ("model", "criterion", "scheduler") and isinstance(value, Optimizer):
                raise ConfigError(
                    f"setup sets self.{name} to an optimizer, {type(value).__name__}: register() returns models, optimizers, criterion "
                    "and schedulers in this order, without those that it did not get"
                )
        registered = set(map(id, self._registered.optimizers))
        self._registered.held = {name: each for name, each in vars(self).items() if id(each) in registered}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train one step on one `batch`, `(*features, target)`: forward, loss, backward, optimizer.
        It is called once for each part of a batch: what belongs to the step goes into
        `on_step(info)`, no collective call is made before the backward pass, and nothing is
        computed from `world_rank` or `world_size`. Return what was measured. If no criterion is
        registered, the model is called with the complete batch, and its own loss is used.

        `batch_info` has `batch_idx`, `epoch_batch`, `global_step`, `epoch_idx`, `part`,
        `last_part`, `rows`, and what was passed as `info`."""
        if "train_batch" not in self._complete_for:
            self._need("train_batch", "model", "optimizer", *self._needs_criterion)
            self._check_optimizer()
        self.zero_grad(self.optimizer)  # first: the forward pass takes up memory that is still in the processor's cache
        lap = self.timers.laps() if self.timers.enabled else bool  # which does nothing, without a call of Python
        with self.autocast():
            output, target, loss, count = self._forward(batch)
        lap("fwd")
        self._internals.counted = count  # a user's `backward` may have no such argument
        try:
            self.backward(loss)
        finally:
            self._internals.counted = None
        lap("grad")
        self.step(self.optimizer)
        lap("apply")
        measured = loss.detach()
        if count is not None:
            setattr(measured, WEIGHT, count.value)
        result = {"train_loss": measured, NUM_SAMPLES: self._samples_in(batch, target)}
        return result | self._measured("train_", output, target) if self._has_metrics else result

    def on_step(self, info: dict[str, Any]) -> None:
        """Called once on every rank after each step that counts, also after one that was left out
        (`info["skipped"]`), for what belongs to the step: counters, averages of the weights,
        pictures, curricula. `info` also has the `global_step` after it, `epoch_idx`, and what was
        passed to `train`.

        Make no collective calls in it. An error is raised as it is, and the step stays made. With a
        `seed`, random numbers are alike on all ranks. An operator without this method costs
        nothing."""

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over `val_iterator`, without gradients and in eval mode. Return what
        to report. `info` is what was passed to `validate`."""
        with torch.no_grad():
            return super().validate(val_iterator, info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Compute loss and metrics of one `batch`. `batch_info`: see `train_batch`."""
        self._need("validate_batch", "model", *self._needs_criterion)
        with self.timers.record("eval_fwd"), self.autocast():
            output, target, loss, count = self._forward(batch)
        measured = loss.detach()
        if count is not None:
            setattr(measured, WEIGHT, count.value)
        result = {"val_loss": measured, NUM_SAMPLES: self._samples_in(batch, target)}
        return result | self._measured("val_", output, target)

    def metrics(self, output: Any, target: Any) -> dict[str, Any]:
        """Compute metrics of one batch besides the loss, from the model's `output` and the
        `target`: with a model that has its own loss, the logits and the labels. If you override it,
        the default `train_batch` reports them as `train_NAME`, and `validate_batch` as `val_NAME`.
        By default, only a validation has one: the accuracy."""
        # A model with its own loss may shift its labels, or have its classes in the last dimension.
        if not hasattr(self, "criterion") and (getattr(target, "ndim", 0) != 1 or target.is_floating_point()):
            return {}
        return {"accuracy": accuracy(output, target, getattr(self, "criterion", None))}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Compute the model's output for one `batch` of `trainer.predict()`: a tensor with a row
        for each sample, or a list, tuple or dict of such tensors. A batch is the features alone, or
        `(*features, target)`, whose target is left out, as are the `labels` of a dictionary for a
        model with its own loss. `batch_info` has its `batch_idx`."""
        self._need("predict_batch", "model")
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            batch = batch[:-1]
        with self.autocast():
            if hasattr(self, "criterion") or self._overrides("train_batch"):
                return self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch)
            features = {k: v for k, v in batch.items() if k != LABELS} if isinstance(batch, Mapping) else batch
            return with_own_loss(self.model, features)[0]

    # -- helpers for custom loops ---------------------------------------------------------------------

    def sample_rng(self, index: Any) -> AbstractContextManager[None]:
        """A context in which torch's, NumPy's and Python's random numbers on the CPU depend on the
        trainer's `seed`, the epoch and the sample's `index` alone, and not on the rank that has the
        sample. Afterwards they continue as before."""
        if self._settings.seed is None:
            raise ConfigError(
                "sample_rng() derives its numbers from the trainer's seed, which is None: pass seed=... to it"
            )
        return seeded_for(self._settings.seed, max(self._internals.position.epoch - 1, 0), index)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for the forward pass and the loss, in the precision of the trainer."""
        return self._registered.precision.autocast()

    def unwrapped(self, model: Any = None) -> Any:
        """The module inside a registered `model`, by default the only one, for its attributes and
        for a forward that only this rank makes: with several workers, `self.model` is a
        DistributedDataParallel, whose forward and backward synchronize the ranks."""
        bare, wrapped = self._registered.models, self._registered.wrapped
        if model is None and len(bare) != 1:
            raise ConfigError(f"{len(bare)} models are registered: pass one of them, unwrapped(model)")
        for inside, outside in zip(bare, wrapped, strict=True):
            if model is None or model is outside or model is inside:
                return inside
        raise ConfigError(f"unwrapped() takes a model that register() returned, got {shown(model)}")

    def to_device(self, batch: Any) -> Any:
        """Move a `batch` to this worker's device, where the loaders' batches are already."""
        return move(batch, self.device)

    # -- for the default methods ----------------------------------------------------------------------

    def _change_with(self, function: Any) -> Any:
        return self._internals.attributes.watch(function) if self._is_distributed else function(self)

    def _begin_epoch(self) -> Any:
        set_modes(self._registered.modes)
        return super()._begin_epoch()

    def _epoch_info(self, num_steps: int | None) -> Mapping[str, Any]:
        return {NUM_STEPS: num_steps, USE_FP16: self.use_fp16}

    def _overrides(self, *names: str) -> list[str]:
        """Find which of these methods the user has changed, in a class or on the object."""
        methods = [name for name in names if getattr(type(self), name) is not getattr(TrainingOperator, name)]
        return methods or [name for name in names if name in vars(self)]

    def _batches_per_epoch(self, workers: int) -> int | None:
        loader = self._train_data("train_loader")
        return (
            None
            if RayData.is_given_as(loader)
            else batches_per_epoch(loader, workers, divided=self._settings.divides_data)
        )

    def _samples_in(self, batch: Any, target: Any = None) -> float:
        drawn = self._internals.feed.step.current
        if drawn.samples is not None and batch is drawn.batch:
            return drawn.samples
        return samples_in(batch if target is None else target)

    def _check_optimizer(self) -> None:
        """Raise ConfigError for optimizers that the default `train_batch` cannot step."""
        if self._overrides("zero_grad", "step"):
            return
        if isinstance(self.optimizer, (list, tuple)):
            raise ConfigError(
                f"the default train_batch steps one optimizer, and self.optimizer is a {type(self.optimizer).__name__} of "
                f"{len(self.optimizer)}: override train_batch, and call self.step(optimizer) for each, or register one optimizer with "
                "several parameter groups"
            )
        if isinstance(self.optimizer, LBFGS):
            raise ConfigError(
                "the default train_batch passes no closure to the optimizer, and LBFGS.step needs one: override train_batch, and call "
                "self.optimizer.step(closure)"
            )

    @property
    def _needs_criterion(self) -> list[str]:
        return [] if self._registered.criterion is None else ["criterion"]

    def _forward(self, batch: Any) -> tuple[Any, Any, Any, Counted | None]:
        """Compute the model's output for a batch, the target, the loss (of the criterion, or the
        model's own without a criterion), and what it is a mean over, if that is not samples."""
        if hasattr(self, "criterion"):
            target = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
            items = self._internals.feed.step.current.samples is None  # of the data set, which may be no batches
            if items or not isinstance(target, torch.Tensor) or not target.dim():
                self._check_batch(batch)
            *features, target = batch
            output = self.model(*features)
            return output, target, self.criterion(output, target), counted_by_criterion(self.criterion, output, target)
        try:
            output, loss = with_own_loss(self.model, batch)
        except TypeError as error:
            if takes(self.model, batch):
                raise
            raise MissingPartError(NO_LOSS) from error
        if loss is None:
            raise MissingPartError(NO_LOSS)
        last = batch[-1] if isinstance(batch, (tuple, list)) else None
        target = batch.get(LABELS) if isinstance(batch, Mapping) else last
        if not isinstance(target, torch.Tensor):
            return output, None, loss, None
        count = counted_by_model(self.unwrapped(self.model), target) if isinstance(batch, Mapping) else None
        return output, target, loss, count

    def _measured(self, prefix: str, output: Any, target: Any) -> dict[str, Any]:
        """What the method `metrics` returns, also if the user has an attribute of that name."""
        with torch.no_grad():
            metrics = self._metrics_hook(self, output, target)
        if not isinstance(metrics, dict):
            raise TypeError(f"{type(self).__name__}.metrics must return a dict of metrics, got {shown(metrics)}")
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def _check_batch(self, batch: Any) -> None:
        loader = self._registered.train_loader
        # Whether the training loader returns each item of its data set as a batch.
        items = isinstance(loader, DataLoader) and loader.batch_size is None and loader.batch_sampler is None
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            target = batch[-1]
            if isinstance(target, torch.Tensor) and target.dim() and not items:
                return
            if isinstance(batch[-1], (int, float)) or (isinstance(batch[-1], torch.Tensor) and not batch[-1].dim()):
                raise ConfigError(
                    f"the default batch methods take batches, but the target of this one is a single number, {batch[-1]!r:.40}. "
                    "A loader with batch_size=None returns each item of its data set as a batch: pass batch_size=n, or let the "
                    "data set return complete batches"
                )
            sizes = [len(part) for part in (batch[0], batch[-1]) if isinstance(part, torch.Tensor) and part.dim()]
            if len(set(sizes)) > 1 and items:
                raise ConfigError(
                    f"the features of this batch have {sizes[0]} rows, and its target has {sizes[1]}. A loader with batch_size=None "
                    "returns each item of its data set as a batch: pass batch_size=n, or let the data set return complete batches. "
                    "If these are batches, override train_batch and validate_batch"
                )
            return
        kind, hint = type(batch).__name__, ""
        if isinstance(batch, (tuple, list, torch.Tensor)):
            of_one = f" of one {type(batch[0]).__name__}" if not isinstance(batch, torch.Tensor) and batch else ""
            kind, hint = f"{kind}{of_one} without a target", "let the data set return (features, target), or "
        raise TypeError(
            f"the default batch methods take (*features, target), got a {kind}: {hint}override train_batch and validate_batch "
            "for other kinds of batches"
        )

    # -- what operators can read ------------------------------------------------------------------------

    @property
    def part_state(self) -> dict[str, Any]:
        """The dict of the part of the batch that `train_batch` has now (`batch_info["part"]`), for
        what it keeps from one batch to the next, such as a hidden state: values that can be
        pickled, and tensors, detached.

        Each part has its own, empty at first. Change it before the backward pass. If a step is
        undone, it is as before that step. Checkpoints and snapshots contain all of them, and each
        goes with its part to another worker. If the only worker that has it fails, it is empty
        again, which the log says. After a load, its tensors are on this worker's device. It is
        there only while `train_batch` runs."""
        return self._internals.part_states.of(self._internals.feed)

    @property
    def use_fp16(self) -> bool | Literal["apex"]:
        """RaySGD's name of the precision."""
        precision = self._settings.options.precision
        return "apex" if precision == "apex" else precision == "fp16"

    @property
    def use_fp16_native(self) -> bool:
        return self._registered.precision.key == "amp_native"

    @property
    def use_fp16_apex(self) -> bool:
        return self._registered.precision.key == "amp_apex"

    @property
    def _amp(self) -> Any:
        """Apex's amp, or the native precision: RaySGD's operators call its autocast()."""
        native = self._registered.precision if self._registered.precision.key == "amp_native" else None
        return getattr(self._registered.precision, "amp", native)

    @property
    def _amp_scaler(self) -> Any:
        return getattr(self._registered.precision, "scaler", None)

    # -- other ways to describe a model ---------------------------------------------------------------

    @classmethod
    def from_creators(cls, *creators: Any, **named: Any) -> type[TrainingOperator]:
        """Make an operator class from creator functions, in this order or by name: model_creator,
        optimizer_creator, data_creator, loss_creator, scheduler_creator."""
        operator_cls: type[TrainingOperator] = offers.operator_from_creators(*creators, **named)
        return operator_cls

    @classmethod
    def from_ptl(
        cls, lightning_module_cls: Any, train_dataloader: Any = None, val_dataloader: Any = None
    ) -> type[TrainingOperator]:
        """Make an operator class from `lightning_module_cls`, a LightningModule class (extra:
        lightning). It has its own loaders, unless `train_dataloader` and `val_dataloader` are
        passed."""
        operator_cls: type[TrainingOperator] = offers.operator_from_lightning(
            lightning_module_cls, train_dataloader, val_dataloader
        )
        return operator_cls


def with_own_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    """Call a model that computes its own loss. Return its output, and the loss: of an object or a
    dict with `logits` and `loss`, as models of transformers return, or of a tuple in which only the
    loss is a single number. A loss that is not there is None; without it, the output can be all
    that the model has returned."""
    arguments, named = _as_arguments(batch)
    result = model(*arguments, **named)
    if isinstance(result, Mapping):
        return result.get("logits", result), result.get("loss")
    if hasattr(result, "loss"):
        return getattr(result, "logits", result), result.loss
    parts = result if isinstance(result, (tuple, list)) else [result]
    tensors = [each for each in parts if isinstance(each, torch.Tensor)]
    losses, outputs = [each for each in tensors if not each.dim()], [each for each in tensors if each.dim()]
    return outputs[0] if outputs else result, losses[0] if len(losses) == 1 else None


def takes(model: Any, batch: Any) -> bool:
    """Whether the model's `forward` has parameters for this batch."""
    arguments, named = _as_arguments(batch)
    try:
        signature(getattr(model, "module", model).forward).bind(*arguments, **named)
    except TypeError:
        return False
    return True


def _as_arguments(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return (), batch
    return batch if isinstance(batch, (tuple, list)) else (batch,), {}

"""The part of torch's operators that registers models, optimizers and data, and makes them ready to
train. Worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from raysgd.constants import STEPPED_BY_TRAINER
from raysgd.errors import ConfigError, shown, suggesting
from raysgd.ray_data.columns import RayData
from raysgd.replica.operator_base import each_loader
from raysgd.torch.group import wrapping
from raysgd.torch.group.fsdp import Shards, shard_layers
from raysgd.torch.registered import Registered, check_parts, refuse_wrapped, strays
from raysgd.torch.state.hyperparameters import with_nested
from raysgd.torch.step.parts.batch_mode import STATIC_GRAPH
from raysgd.torch.step.schedules import Scheduling

logger = logging.getLogger("raysgd")

REGISTERED_AGAIN = (
    "setup calls self.register() a second time. Only the parts of the last call are trained and saved. Pass all models and optimizers "
    "in one call"
)
STRAYS = (
    "the optimizer %s holds parameters that no registered model has: %d. raysgd neither saves nor averages them. If a layer was "
    "replaced, create the optimizer after that. Otherwise, register the module that has them"
)
EVAL_MODE = (
    "setup has left the model %s in eval mode, in which from_pretrained() returns one, but an optimizer trains it. It trains without "
    "dropout, and with fixed statistics of BatchNorm. Call train() on the model in setup. Ignore this if you want that"
)
NOT_REGISTERED = (
    "setup sets self.%s to a %s that is not registered. raysgd does not step it, and checkpoints and replacement workers lack it. "
    "Register it, self.register(..., schedulers=self.%s), with the trainer's argument scheduler_step_freq"
)
REPLACED = (
    "self.%s is no longer the optimizer that setup has registered. raysgd saves the registered one, and checkpoints and new workers "
    "lack the other. Change the registered one, for example with self.%s.param_groups, or create a trainer with another setup"
)


class Registering(Scheduling):
    """Has `register`, `register_data` and `register_metrics`, and wraps what they get for several
    workers."""

    _device: torch.device

    @property
    def device(self) -> torch.device:
        """The device of models and batches."""
        return self._device

    @property
    def _is_distributed(self) -> bool:
        return self._settings.distributed

    @property
    def device_ids(self) -> list[int] | None:
        return [self.device.index or 0] if self.device.type == "cuda" else None

    @suggesting
    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ddp_args: Mapping[str, Any] | None = None,
        apex_args: Mapping[str, Any] | None = None,
    ) -> Any:
        """Register the parts of training. Return them ready to use (on the device, in the
        precision, wrapped in DDP), each in the container it came in. A criterion or scheduler that
        is not passed is not returned.

        models      a module, or a list or dict of modules
        optimizers  an optimizer of torch, or several in a list or tuple; [] if it only validates
        criterion   the loss; it is moved to the device
        schedulers  learning-rate schedulers of the optimizers: one, or a list or dict
        ddp_args    arguments of DistributedDataParallel
        apex_args   arguments of `apex.amp.initialize`, for the precision "apex"
        """
        registered = self._registered
        bare = registered.as_list(models)
        if not bare or not all(isinstance(model, nn.Module) for model in bare):
            raise ConfigError(f"models must be a torch.nn.Module or a list or tuple of them, got {models!r}")
        if optimizers is None:
            raise ConfigError("optimizers must not be None: pass [] if this operator only validates or predicts")
        self._check_arguments(criterion, schedulers, ddp_args, apex_args)
        if registered.options.parallel is not None:
            refuse_wrapped(bare)
        check_parts(bare, registered.as_list(optimizers), criterion, registered.as_list(schedulers))
        if registered.is_complete:
            self._internals.warn_once(REGISTERED_AGAIN)
        for each in strays(bare, registered.as_list(optimizers)):
            self._internals.warn_once(STRAYS, *each)
        first, unused = self._internals.rank_info.world_rank == 0, schedulers is None
        if first and unused and self.scheduler_step_freq in STEPPED_BY_TRAINER:
            logger.warning(
                "scheduler_step_freq=%r has no effect, because register() got no schedulers: pass it schedulers=..., which are "
                "then stepped, and saved in checkpoints",
                self.scheduler_step_freq,
            )
        bare = [model.to(self.device) for model in bare]
        if isinstance(criterion, nn.Module):
            criterion = criterion.to(self.device)
        bare = wrapping.formatted(bare, registered.options, distributed=self._is_distributed)
        stepped, apex_args = registered.as_list(optimizers), dict(apex_args or {})
        registered.models, registered.optimizers = registered.precision.prepare(bare, stepped, apex_args)
        registered.criterion, registered.schedulers = criterion, registered.as_list(schedulers)
        wrapping.compile_models(registered.models, registered.options)
        self._wrap(dict(ddp_args or {}))
        wrapping.update_together(registered.optimizers)
        self._watch(registered)
        registered.is_complete = True
        optional = [criterion, None if schedulers is None else registered.like(schedulers, registered.schedulers)]
        ready = [registered.like(models, registered.wrapped), registered.like(optimizers, registered.optimizers)]
        return (*ready, *(each for each in optional if each is not None))

    def _watch(self, registered: Registered) -> None:
        """Register what acts at the steps of optimizers, in its order."""
        if self._internals.whole is not None:
            self._internals.whole.require_hooks(registered.optimizers)
        if self._settings.adds_parts or not self._has_own_steps:
            self._watch_steps(registered.optimizers)  # before others, which change gradients

    def _warn_of_replaced(self) -> None:
        """Warn if an optimizer that `setup` has registered is another object now."""
        registered = set(map(id, self._registered.optimizers))
        for name, before in self._registered.held.items():
            now = vars(self).get(name)
            if now is not None and now is not before and id(now) not in registered:
                self._internals.warn_once(REPLACED, name, name)

    def _warn_of_eval_mode(self) -> None:
        stepped = {id(each) for each in self._registered.stepped_by(*self._registered.optimizers) if each.requires_grad}
        for model in self._registered.models:
            if not model.training and any(id(each) in stepped for each in model.parameters()):
                self._internals.warn_once(EVAL_MODE, type(model).__name__)

    def _warn_of_schedulers(self) -> None:
        """Warn if `setup` has created a scheduler that it has not registered."""
        known = set(map(id, with_nested(self._registered.schedulers)))
        for name, value in vars(self).items():
            if isinstance(value, LRScheduler) and id(value) not in known:
                self._internals.warn_once(NOT_REGISTERED, name, type(value).__name__, name)

    def _check_arguments(self, criterion: Any, schedulers: Any, ddp_args: Any, apex_args: Any) -> None:
        if schedulers is not None and self.scheduler_step_freq is None:
            raise ConfigError(
                "register got schedulers, but the trainer does not say when they step: pass it "
                "scheduler_step_freq='batch', 'step', 'epoch' or 'manual'"
            )
        if self._settings.is_exact and getattr(criterion, "reduction", None) == "sum":
            raise ConfigError(
                f"the criterion {type(criterion).__name__} sums over the batch, but with several workers a step's gradient is the mean "
                "over its samples. Use reduction='mean'. For the mean of the workers' sums, pass TrainingOptions(gradients='ranks')"
            )
        for name, arguments in {"ddp_args": ddp_args, "apex_args": apex_args}.items():
            if arguments is not None and not isinstance(arguments, Mapping):
                raise ConfigError(f"{name} must be a dict of keyword arguments, got {arguments!r}")
        self._registered.options.check_ddp(ddp_args or {})
        if (ddp_args or {}).get("static_graph"):
            self._internals.keep_batch.why = STATIC_GRAPH
        if ddp_args and self._registered.options.parallel == "fsdp":
            raise ConfigError(
                "register(ddp_args=...) is for DistributedDataParallel, but parallel is 'fsdp': leave one out"
            )

    @suggesting
    def register_data(
        self, *, train_loader: Any = None, validation_loader: Any = None, test_loader: Any = None
    ) -> None:
        """Register `train_loader`, `validation_loader` and `test_loader`: DataLoaders (divided
        among the workers unless add_dist_sampler=False), Ray Datasets (divided by rows;
        `raysgd.data.RayData` names their columns), or any iterables. For validations and tests also
        a dict of them by name: `val_loss` is then `val_NAME_loss`, over the samples of that
        loader."""
        loaders = {"train_loader": train_loader, "validation_loader": validation_loader, "test_loader": test_loader}
        for name, loader in (pair for item in loaders.items() for pair in each_loader(*item)):
            if isinstance(loader, torch.utils.data.Dataset) and not hasattr(loader, "__iter__"):
                raise ConfigError(
                    f"{name} must be a DataLoader or another iterable of batches, got the data set {shown(loader)}: pass "
                    "DataLoader(data_set, batch_size=...)"
                )
            iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__") or RayData.is_given_as(loader)
            iterable = iterable and not isinstance(loader, (str, bytes, Mapping, type))
            if loader is not None and not iterable:
                raise ConfigError(
                    f"{name} must be a DataLoader or another iterable of batches, or a Ray Dataset, got {loader!r}"
                )
        for name, loader in loaders.items():
            setattr(self._registered, name, loader)

    @suggesting
    def register_metrics(self, *, train: Any = None, validation: Any = None, test: Any = None) -> Any:
        """Register TorchMetrics objects (a Metric or MetricCollection each) for `train`,
        `validation` and `test`. Update them in your batch methods; they are computed over all
        workers, reported by name, and reset for each call. Return them on the device. A test that
        has no `test_batch` and no metric of its own uses those of the validation."""
        metrics = {"train": train, "validation": validation, "test": test}
        self._registered.metrics = {
            name: metric.to(self.device) for name, metric in metrics.items() if metric is not None
        }
        result = list(self._registered.metrics.values())
        return result[0] if len(result) == 1 else tuple(result)

    def _wrap(self, ddp_args: dict[str, Any]) -> None:
        registered, options = self._registered, self._registered.options
        registered.wrapped = list(registered.models)
        if not self._is_distributed:
            return
        if options.parallel == "fsdp":
            registered.shards = Shards(registered.models, registered.optimizers, self._configure_fsdp, self.device)
        elif self._settings.wrap_ddp:
            registered.ddp_args = wrapping.ddp_arguments(options, ddp_args, self.device_ids)
            registered.keep_parameters()
            registered.wrapped = self._configure_ddp(registered.models, self.device_ids, ddp_args)
            wrapping.adapt(registered.wrapped, registered.ddp_args, options)
            if self.device.type != "cpu" and options.accumulate == 1:
                self._internals.pace.newest = registered.newest_wait_s
        registered.exchange.prepare(registered.models, registered.optimizers)
        if not self._internals.rank_info.solo:
            registered.exchange.equalize()
            registered.exchange.joined()

    def _configure_fsdp(self, model: nn.Module, mesh: Any) -> None:
        """Shard one model in place over the mesh, with `torch.distributed.fsdp.fully_shard`.
        Override it to shard in another way."""
        shard_layers(model, mesh)

    def _configure_ddp(
        self, models: list[nn.Module], device_ids: list[int] | None, ddp_args: dict[str, Any]
    ) -> list[nn.Module]:
        """Wrap models in DDP, those with gradients. Override it to wrap them in another way."""
        return [
            DistributedDataParallel(model, **self._registered.ddp_args)
            if any(parameter.requires_grad for parameter in model.parameters())
            else model
            for model in models
        ]

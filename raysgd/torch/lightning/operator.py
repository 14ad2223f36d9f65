"""A LightningModule as an operator: raysgd's loop calls its steps and hooks. Worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError
from raysgd.torch.lightning import module as modules
from raysgd.torch.lightning.logging import LoggedValues, is_number
from raysgd.torch.lightning.trainer_stub import TrainerStub
from raysgd.torch.operator import TrainingOperator


def operator_from_lightning(
    module_cls: Any, train_dataloader: Any = None, val_dataloader: Any = None
) -> type[LightningOperator]:
    """Make a `LightningOperator` for this class. Without loaders, it has the module's own."""
    modules.lightning_base(module_cls)
    loaders = {
        "train_dataloader": modules.one_loader(train_dataloader, "train_dataloader"),
        "val_dataloader": modules.one_loader(val_dataloader, "val_dataloader"),
    }
    return type(f"{module_cls.__name__}Operator", (LightningOperator,), {"module_cls": module_cls, "loaders": loaders})


class LightningOperator(TrainingOperator):
    """Trains a LightningModule, as Lightning's Trainer would, one epoch for each `trainer.train()`:

        prepare_data, setup("fit"), configure_model, configure_optimizers, on_fit_start     once
        on_train_start, on_train_epoch_start
        for each batch:
            on_train_batch_start, training_step, backward and step with their hooks, on_train_batch_end
        schedulers, on_train_epoch_end

    Owns the module, the values that it logs, and its schedulers. The trainer's `ddp_args` override
    those of this class.
    """

    _has_own_steps = True
    module_cls: ClassVar[type]
    loaders: ClassVar[dict[str, Any]] = {}
    ddp_args: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def setup(self, config: dict[str, Any]) -> None:
        self._base = modules.lightning_base(self.module_cls)
        self.module = module = modules.construct(self.module_cls, config)
        modules.refuse_unsupported(module, self._base, self._settings)
        self._stub = module.trainer = TrainerStub(self._internals.rank_info, self.total_steps)
        self._epoch, self._batch_idx = -1, 0
        self._open = False  # whether an epoch has begun for which on_train_epoch_end was not called
        self._announced: int | None = None  # the epoch for which this process has called on_train_epoch_start
        self._started = False
        self._prepare_data()
        module.setup("fit")
        module.configure_model()
        module.to(self.device)
        optimizers, self._schedules = modules.read_configuration(module, self._base)
        ddp_args = {**self.ddp_args, **self._settings.options.ddp_args}
        self.register(models=module, optimizers=optimizers, ddp_args=ddp_args)
        # Not through `register`, because the module says when its schedulers step, and not scheduler_step_freq.
        self._registered.schedulers = [schedule.scheduler for schedule in self._schedules]
        if self._registered.train_loader is None:
            self._register_loaders()
        self._logged = LoggedValues()
        self._indexed = modules.takes_index(module.training_step), modules.takes_index(module.validation_step)
        module.on_fit_start()

    def _register_loaders(self) -> None:
        self.register_data(
            train_loader=self._loader("train_dataloader"), validation_loader=self._loader("val_dataloader")
        )

    def _train_data(self, name: str) -> Any:
        if self._registered.train_loader is None:  # configure_optimizers asks for the number of steps
            self._register_loaders()
        return super()._train_data(name)

    def _prepare_data(self) -> None:
        """Call prepare_data on the first worker of each machine, while the others wait."""
        per_node = getattr(self.module, "prepare_data_per_node", True)
        if self.local_rank == 0 and (per_node or self._internals.rank_info.world_rank == 0):
            self.module.prepare_data()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier(device_ids=self.device_ids)

    def _loader(self, name: str) -> Any:
        loader = self.loaders.get(name)
        if loader is None and modules.overrides(self.module, self._base, name):
            loader = modules.one_loader(getattr(self.module, name)(), f"{type(self.module).__name__}.{name}")
        return loader

    def _configure_ddp(
        self, models: list[nn.Module], device_ids: list[int] | None, ddp_args: dict[str, Any]
    ) -> list[nn.Module]:
        return super()._configure_ddp([_TrainingStep(model) for model in models], device_ids, ddp_args)

    # -- RaySGD's names for the parts -----------------------------------------------------------------

    def get_model(self) -> Any:
        """The LightningModule itself."""
        return self.module

    @property
    def model(self) -> Any:
        """The module as it is trained: with several workers, wrapped in DDP."""
        return self._registered.wrapped[0]

    @property
    def optimizers(self) -> list[Any]:
        return self._registered.optimizers

    @property
    def schedulers(self) -> list[Any]:
        return self._registered.schedulers

    @property
    def scheduler_dicts(self) -> list[dict[str, Any]]:
        """When each scheduler steps, with the keys of Lightning's `lr_scheduler` dicts."""
        return [dict(vars(each)) for each in self._schedules]

    # -- training -------------------------------------------------------------------------------------

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        feed = self._internals.feed
        self._internals.begin_metrics()
        module = self.module
        with self._attached("training"):
            if not self._started:
                self._started = True
                module.on_train_start()
            for batch in iterator:
                self._enter_epoch((feed.epoch or epoch_idx + 1) - 1)
                self._logged.begin_batch()
                batch_idx = self._batch_idx
                if module.on_train_batch_start(batch, batch_idx) == -1:
                    raise ConfigError(
                        f"{type(module).__name__}.on_train_batch_start has returned -1, which from_ptl does not support: "
                        f"{modules.INSTEAD}"
                    )
                measured = self.train_batch(
                    batch, {"batch_idx": batch_idx, "global_step": self.global_step, **(info or {})}
                )
                for policy in feed.step.policies.before_commit if feed.step.closing else ():
                    policy(feed.step)
                self.global_step += 1
                self._batch_idx += 1
                self._stub.global_step = self.global_step
                self._step_schedulers("step", self._batch_idx)
                module.on_train_batch_end(self._outputs, batch, batch_idx)
                self._count(feed.step, self._logged.end_batch(measured))
            if feed.between_epochs:
                self._close_epoch()
            return self._report()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Run one training step with its hooks. Report its loss as train_loss, and the rest."""
        module, precision, (optimizer,) = self.module, self._registered.precision, self._registered.optimizers
        arguments = (batch, batch_info["batch_idx"]) if self._indexed[0] else (batch,)
        wrapped = self._registered.wrapped[0]
        step = wrapped if isinstance(wrapped, DistributedDataParallel) else module.training_step
        with self.timers.record("fwd"), self.autocast():
            output = step(*arguments)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"{type(module).__name__}.training_step must return the loss, or a dict with the key 'loss', got {output!r}. "
                f"To leave out a batch, {modules.INSTEAD}"
            )
        self._outputs = _outputs(output)
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        module.on_before_backward(loss)
        with self.timers.record("grad"):
            precision.backward(loss, optimizer)
        module.on_after_backward()
        precision.unscale(optimizer)
        module.on_before_optimizer_step(optimizer)
        self._clip(precision.parameters(optimizer))
        precision.step(optimizer)
        return _measured("train_loss", self._outputs, self._samples_in(batch))

    def _clip(self, parameters: list[torch.Tensor]) -> None:
        options = self._settings.options
        if options.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, options.clip_value)
        if options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_norm)

    def _step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers that are due after batch number `count` of an epoch, or after epoch
        number `count`."""
        for each in self._schedules:
            if each.interval == interval and count % each.frequency == 0:
                each.scheduler.step()

    # -- epochs ---------------------------------------------------------------------------------------

    def _enter_epoch(self, epoch: int) -> None:
        """Begin and end epochs before a batch, which may be the first one in this process."""
        if self._open and epoch != self._epoch:
            self._close_epoch()
        if not self._open:
            self._epoch, self._batch_idx, self._open = epoch, 0, True
        self._stub.current_epoch = self._epoch
        self._announce_epoch()

    def _announce_epoch(self) -> None:
        if self._announced != self._epoch:
            self._announced = self._epoch
            self.module.on_train_epoch_start()

    def _close_epoch(self) -> None:
        """End the epoch that is open, if one is."""
        if not self._open:
            return
        self._announce_epoch()
        self._open, self._announced = False, None
        self._step_schedulers("epoch", self._epoch + 1)
        self.module.on_train_epoch_end()

    # -- validation -----------------------------------------------------------------------------------

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        module = self.module
        if not modules.overrides(module, self._base, "validation_step"):
            raise ConfigError(f"validate() needs a validation_step in {type(module).__name__}")
        feed = self._internals.feed
        self._internals.begin_metrics()
        with self._attached("validating"), torch.no_grad():
            module.on_validation_start()
            module.on_validation_epoch_start()
            for batch_idx, batch in enumerate(val_iterator):
                self._logged.begin_batch()
                module.on_validation_batch_start(batch, batch_idx)
                measured = self.validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
                module.on_validation_batch_end(self._outputs, batch, batch_idx)
                self._count(feed.step, self._logged.end_batch(measured))
            if feed.stopped:
                return dict(self._internals.meter.summary())  # a worker has failed, and the validation will be repeated
            module.on_validation_epoch_end()
            report = self._report()
            module.on_validation_end()
        return report

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Run one validation step. Report a returned loss as val_loss, and the rest."""
        arguments = (batch, batch_info["batch_idx"]) if self._indexed[1] else (batch,)
        with self.timers.record("eval_fwd"), self.autocast():
            self._outputs = self.module.validation_step(*arguments)
        return _measured("val_loss", _outputs(self._outputs), self._samples_in(batch))

    # -- both -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _attached(self, phase: str) -> Iterator[None]:
        """Replace `self.log` during a call. Between calls, the module is as its class made it."""
        stub = self._stub
        stub.join(self._internals.rank_info)
        stub.global_step = self.global_step
        self._logged.begin_call(self.world_rank)
        inner: list[Any] = [each for each in self.module.modules() if isinstance(each, self._base)]
        for each in inner:
            each.log = self._logged.log
        setattr(stub, phase, True)
        try:
            yield
        finally:
            setattr(stub, phase, False)
            for each in inner:
                del each.log

    def _report(self) -> dict[str, Any]:
        report = {**self._internals.meter.summary(), **self._logged.outside_batches}
        self._stub.callback_metrics.update(report)
        return report

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {"epoch": self._epoch, "global_step": self.global_step}
        self.module.on_save_checkpoint(checkpoint)
        return {"epoch": self._epoch, "batch_idx": self._batch_idx, "open": self._open, "module": checkpoint}

    def load_state_dict(self, state_dict: Any) -> None:
        if not state_dict:
            return
        if state_dict["epoch"] != self._epoch:
            self._announced = None  # this process has not called on_train_epoch_start for that epoch
        self._epoch, self._batch_idx, self._open = (state_dict[name] for name in ("epoch", "batch_idx", "open"))
        self._stub.current_epoch = max(self._epoch, 0)
        self.module.on_load_checkpoint(state_dict["module"])


class _TrainingStep(nn.Module):
    """The module that DDP wraps. Its forward is the training step, because DDP averages the
    gradients of what its forward did."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)  # type: ignore[operator]


def _outputs(output: Any) -> dict[str, Any]:
    """A step's result as the dictionary that batch hooks get, without the autograd graph."""
    if output is None:
        return {}
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    if not isinstance(output, dict):
        raise TypeError(f"a step must return a loss, a dict with the key 'loss', or None; got {type(output).__name__}")
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}


def _measured(name: str, outputs: dict[str, Any], samples: float) -> dict[str, Any]:
    """What is reported for a batch of so many samples if the module logs nothing: the numbers in
    the step's dictionary, each by its key and the loss as `name`. What is not a number, such as
    predictions, is only for the module's hooks."""
    numbers = {key: value for key, value in outputs.items() if is_number(value)}
    loss = {name: numbers.pop("loss")} if "loss" in numbers else {}
    return {NUM_SAMPLES: samples, **loss, **numbers}

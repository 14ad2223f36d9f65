"""A LightningModule as an operator: raysgd's loop calls its steps, hooks and optimizers. Worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from numbers import Number
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError
from raysgd.torch.lightning import module as modules
from raysgd.torch.lightning.logging import LoggedValues
from raysgd.torch.lightning.schedulers import Schedules, read_configuration
from raysgd.torch.lightning.trainer_stub import StepServices, TrainerStub
from raysgd.torch.operator import TrainingOperator
from raysgd.training.feed import NoFeed


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
        self._stub = module.trainer = TrainerStub(
            module, self._internals.rank_info, self._settings.options, self.total_steps
        )
        self._epoch, self._batch_idx = -1, 0
        self._open = False  # whether an epoch has begun for which on_train_epoch_end was not called
        self._announced: int | None = None  # the epoch for which this process has called on_train_epoch_start
        self._started = False
        self._prepare_data()
        module.setup("fit")
        module.configure_model()
        module.to(self.device)
        core = modules.optimizers_of(self._base)
        optimizers, schedules = read_configuration(module, core)
        self._schedules = Schedules(module, schedules, self.device)
        ddp_args = {**self.ddp_args, **self._settings.options.ddp_args}
        self.register(models=module, optimizers=optimizers, ddp_args=ddp_args)
        # Not through `register`, because the module says when its schedulers step, and not scheduler_step_freq.
        self._parts.schedulers = [schedule.scheduler for schedule in schedules]
        if self._parts.train_loader is None:
            self._register_loaders()
        self._attach_stub(optimizers, core)
        module.on_fit_start()

    def _register_loaders(self) -> None:
        self.register_data(
            train_loader=self._loader("train_dataloader"), validation_loader=self._loader("val_dataloader")
        )

    def _train_data(self, name: str) -> Any:
        if self._parts.train_loader is None:  # configure_optimizers asks for the number of steps
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
        given = self.loaders.get(name)
        if given is None and modules.overrides(self.module, self._base, name):
            given = modules.one_loader(getattr(self.module, name)(), f"{type(self.module).__name__}.{name}")
        return given

    def _attach_stub(self, optimizers: list[Any], core: Any) -> None:
        module, wrapped = self.module, self._parts.wrapped[0]
        self._logged = LoggedValues(module)
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        self._services = StepServices(module, self._parts.precision, optimizers, core)
        self._stub.attach(self._services, optimizers, self._schedules.all)
        self._indexed = modules.takes_index(module.training_step), modules.takes_index(module.validation_step)

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
        return self._parts.wrapped[0]

    @property
    def optimizers(self) -> list[Any]:
        return self._parts.optimizers

    @property
    def schedulers(self) -> list[Any]:
        return self._parts.schedulers

    @property
    def scheduler_dicts(self) -> list[dict[str, Any]]:
        """When each scheduler steps, with the keys of Lightning's `lr_scheduler` dicts."""
        return [dict(vars(each)) for each in self._schedules.all]

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
        with self._attached("training", new=not feed.position.call_batches):
            if not self._started:
                self._started = True
                module.on_train_start()
            for batch in iterator:
                self._enter_epoch((feed.epoch or epoch_idx + 1) - 1)
                self._logged.begin_batch()
                batch, batch_idx = self._transferred(batch), self._batch_idx
                if module.on_train_batch_start(batch, batch_idx) == -1:
                    if isinstance(feed, NoFeed):
                        break
                    feed.end_epoch()
                    continue
                measured = self.train_batch(
                    batch, {"batch_idx": batch_idx, "global_step": self.global_step, **(info or {})}
                )
                for policy in feed.step.policies.before_commit if feed.step.closing else ():
                    policy(feed.step)
                self.global_step += 1
                self._batch_idx += 1
                self._stub.global_step = self.global_step
                self._schedules.step("step", self._batch_idx, unless=self._keeps_rate)
                module.on_train_batch_end(self._outputs, batch, batch_idx)
                self._count(feed.step, self._logged.end_batch(measured))
            if feed.between_epochs:
                self._close_epoch(last=True)
            return self._report()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Run one training step with its hooks. Report its loss as train_loss, and the rest."""
        self._outputs: dict[str, Any] = {}
        arguments = (batch, batch_info["batch_idx"]) if self._indexed[0] else (batch,)
        self._optimize(arguments)
        return _measured("train_loss", self._outputs, self._samples_in(batch))

    def _optimize(self, arguments: tuple[Any, ...]) -> None:
        """Step the optimizer, which calls the closure once, or several times (L-BFGS)."""
        module, optimizer = self.module, self._parts.optimizers[0]
        epoch, batch_idx = self._epoch, self._batch_idx
        ran = False

        def closure() -> Any:
            nonlocal ran
            ran = True
            output = self._training_step(arguments)
            self._outputs = _outputs(output)
            loss = self._loss(output)
            module.on_before_zero_grad(optimizer)
            module.optimizer_zero_grad(epoch, batch_idx, optimizer)
            if loss is not None:
                with self.timers.record("grad"):
                    self._services.backward(loss, optimizer)
            return loss

        module.optimizer_step(epoch, batch_idx, self._services._lightning_optimizers[0], closure)
        if not ran:
            raise ConfigError(
                f"{type(module).__name__}.optimizer_step did not call its closure: call "
                "optimizer.step(closure=optimizer_closure), or optimizer_closure() itself"
            )

    def _loss(self, output: Any) -> Any:
        """The loss, or None to skip the batch, which only a single worker can."""
        if output is None and self._ddp is None:
            return None
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"{type(self.module).__name__}.training_step must return the loss, or a dict with the key "
                f"'loss', got {output!r} (None, to leave out a batch, is possible with one worker only)"
            )
        return loss

    def _training_step(self, arguments: tuple[Any, ...]) -> Any:
        with self.timers.record("fwd"), self.autocast():
            return self.module.training_step(*arguments) if self._ddp is None else self._ddp(*arguments)

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

    def _close_epoch(self, *, last: bool = False) -> None:
        """End the epoch that is open, if one is. It is the `last` one of a call, or the call
        continues with its metric objects."""
        if not self._open:
            return
        self._announce_epoch()
        self._open, self._announced = False, None
        count = self._epoch + 1
        self._schedules.step("epoch", count)
        self.module.on_train_epoch_end()
        self._schedules.end_epoch(count)
        self._schedules.step_plateaus(self._report(resets=last), self._parts.calls.control)

    # -- validation -----------------------------------------------------------------------------------

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        module = self.module
        if not modules.overrides(module, self._base, "validation_step"):
            raise ConfigError(f"validate() needs a validation_step in {type(module).__name__}")
        feed = self._internals.feed
        self._internals.begin_metrics()
        with self._attached("validating", new=True), torch.no_grad():
            module.on_validation_start()
            module.on_validation_epoch_start()
            for batch_idx, batch in enumerate(val_iterator):
                self._logged.begin_batch()
                batch = self._transferred(batch)
                module.on_validation_batch_start(batch, batch_idx)
                measured = self.validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
                module.on_validation_batch_end(self._outputs, batch, batch_idx)
                self._count(feed.step, self._logged.end_batch(measured))
            if feed.stopped:
                return dict(self._internals.meter.summary())  # a worker has failed, and the validation will be repeated
            module.on_validation_epoch_end()
            report = self._report()
            module.on_validation_end()
        self._schedules.step_plateaus(report, self._parts.calls.control)
        return report

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Run one validation step. Report a returned loss as val_loss, and the rest."""
        arguments = (batch, batch_info["batch_idx"]) if self._indexed[1] else (batch,)
        with self.timers.record("eval_fwd"), self.autocast():
            self._outputs = self.module.validation_step(*arguments)
        return _measured("val_loss", _outputs(self._outputs), self._samples_in(batch))

    # -- both -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _attached(self, phase: str, *, new: bool) -> Iterator[None]:
        """Replace `self.log` during a call. Between calls, the module is as its class made it."""
        stub = self._stub
        stub.join(self._internals.rank_info)
        stub.global_step = self.global_step
        self._logged.begin_call(self.world_rank, new=new)
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

    def _transferred(self, batch: Any) -> Any:
        """The batch, on the device already, after the module's own transfer hooks."""
        module = self.module
        batch = module.on_before_batch_transfer(batch, 0)
        if modules.overrides(module, self._base, "transfer_batch_to_device"):
            batch = module.transfer_batch_to_device(batch, self.device, 0)
        return module.on_after_batch_transfer(batch, 0)

    def _report(self, *, resets: bool = True) -> dict[str, Any]:
        logged = self._logged.computed(self._parts.calls.control, resets=resets)
        report = {**self._internals.meter.summary(), **logged}
        self._stub.callback_metrics.update(report)
        return report

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"epoch": self._epoch, "global_step": self.global_step}
        self.module.on_save_checkpoint(own)
        return {
            "epoch": self._epoch,
            "batch_idx": self._batch_idx,
            "open": self._open,
            "due": [*self._schedules.due],
            "module": own,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        if not state_dict:
            return
        if len(state_dict["due"]) != len(self._schedules.due):
            raise ValueError(f"it has {len(state_dict['due'])} schedulers, and this module {len(self._schedules.due)}")
        if state_dict["epoch"] != self._epoch:
            self._announced = None  # this process has not called on_train_epoch_start for that epoch
        self._epoch, self._batch_idx, self._open = (state_dict[name] for name in ("epoch", "batch_idx", "open"))
        self._stub.current_epoch = max(self._epoch, 0)
        self._schedules.due = [*state_dict["due"]]
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
    numbers = {key: value for key, value in outputs.items() if _is_number(value)}
    loss = {name: numbers.pop("loss")} if "loss" in numbers else {}
    return {NUM_SAMPLES: samples, **loss, **numbers}


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)

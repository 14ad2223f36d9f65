"""What an operator registered: models, optimizers, schedulers, criterion, loaders. Worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raysgd.core.control import Control
from raysgd.errors import ConfigError, shown
from raysgd.replica.operator_base import RegisteredBase
from raysgd.torch.foreign import exposed_communication_s, measure_communication, multiply_all, unnoticed
from raysgd.torch.group import wrapping
from raysgd.torch.group.fsdp import Shards
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.options import TrainingOptions
from raysgd.torch.step.precision import Precision

LARGE = 1 << 20  # bytes of a buffer that is sent by itself, so that not all need memory a second time
PREFIX = {"train": "train_", "validation": "val_", "test": "test_"}


UNFROZEN = (
    "the parameter {name} of {model} was frozen when it was registered, and requires gradients now. DistributedDataParallel does not "
    "average its gradients. Register the model unfrozen, with ddp_args={{'find_unused_parameters': True}}, and freeze it in "
    "train_batch: self.body.requires_grad_(batch_info['epoch_idx'] >= 2)"
)
NEW = (
    "the parameter {name} of {model} is new since self.register(). DistributedDataParallel does not average its gradients. In setup, "
    "replace layers first, then create the optimizer, then call self.register()"
)
LEFT = (
    "setup has frozen the parameter {name} after self.register(), or replaced it, as tied weights do. It gets no gradient, and "
    "DistributedDataParallel waits for one. Do that before self.register(), or pass ddp_args={{'find_unused_parameters': True}} to it"
)
REGROUPED = (
    "the optimizer {optimizer} has parameter groups of {now} parameters, and had {before} at the end of setup. No replacement worker "
    "and no other script can load its state. Register it with all groups, and freeze those that train later in train_batch: "
    "self.body.requires_grad_(batch_info['epoch_idx'] >= 2), on several workers with ddp_args={{'find_unused_parameters': True}}"
)


@dataclass
class Registered(RegisteredBase):
    """Adds what only torch needs: what the operator trains with, and policies are made of. `models`
    are bare; `wrapped` is what the operator trains with."""

    wrapped: list[nn.Module] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)  # the operator's attributes that `setup` has set to optimizers
    schedules_at: dict[int, Any] = field(default_factory=dict)  # each one's steps after raysgd's loop, by its id
    ddp_args: dict[str, Any] = field(default_factory=dict)
    # Those that trained when the models were wrapped, each with the number of its model, and its name.
    trained: dict[nn.Parameter, tuple[int, str]] = field(default_factory=dict)
    frozen: list[nn.Parameter] = field(default_factory=list)  # at that time
    groups: list[list[int]] = field(default_factory=list)  # how many parameters each optimizer's have after `setup`
    train_loader: Any = None
    validation_loader: Any = None
    test_loader: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    options: TrainingOptions = field(default_factory=TrainingOptions)
    shards: Shards | None = None
    exchange: Exchange = field(default_factory=Exchange)
    control: Control = field(default_factory=Control)
    precision: Precision = field(default_factory=Precision)
    modes: dict[nn.Module, bool] = field(default_factory=dict)  # whether each is in train mode, at the end of `setup`

    @staticmethod
    def is_single(value: Any) -> bool:
        """Whether this is one object, even if it can be iterated, as a Sequential."""
        if isinstance(value, (nn.Module, Optimizer, str, bytes, dict)) or hasattr(value, "step"):
            return True
        return not isinstance(value, Iterable)

    def stepped_by(self, *optimizers: Any) -> list[torch.Tensor]:
        """The tensors that the steps of these optimizers change: the parameters, or with Apex,
        copies of them."""
        return [tensor for each in optimizers for tensor in self.precision.parameters(each)]

    def multiply_gradients(self, factor: Any) -> None:
        """Multiply the gradients that this rank has computed and not exchanged, in place."""
        # Once each, because two optimizers may step the same parameter.
        by_id = {id(each): each.grad for each in self.stepped_by(*self.optimizers)}
        gradients = [each for each in by_id.values() if each is not None]
        with unnoticed(gradients):  # unlike what user code does to them
            multiply_all(gradients, factor)
        multiply_all(self.shards.unexchanged_gradients() if self.shards else [], factor)

    def rewrap(self) -> None:
        """Reset what wraps the models, because a new generation is up."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        wrapping.rewrap(self.wrapped, self.trained, self.ddp_args, self.options)
        self.exchange.joined()

    def keep_parameters(self) -> None:
        """Note the parameters that DDP will know."""
        named = [(each, (at, name)) for at, model in enumerate(self.models) for name, each in model.named_parameters()]
        self.trained = {each: place for each, place in named if each.requires_grad}
        self.frozen = [each for each, _ in named if not each.requires_grad]

    def end_setup(self) -> None:
        """Note the optimizers' groups and the models' modes. Raise ConfigError if `setup` has left
        parameters without gradients for which DDP waits."""
        self.groups = self._groups_now()
        for at, (model, wrapper) in enumerate(zip(self.models, self.wrapped, strict=True)):
            trained = {id(each) for each in model.parameters() if each.requires_grad}
            known = {name: id(each) in trained for each, (place, name) in self.trained.items() if place == at}
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            names = [name for name, trains in known.items() if not trains and name not in ignored]
            if not names or not any(known.values()) or not isinstance(wrapper, DistributedDataParallel):
                continue  # DDP does not wait if no parameter gets a gradient
            if not (wrapper.find_unused_parameters or wrapper.static_graph):
                raise ConfigError(LEFT.format(name=names[0]))
        self._keep_modes()

    def _groups_now(self) -> list[list[int]]:
        return [[len(group["params"]) for group in getattr(each, "param_groups", ())] for each in self.optimizers]

    def refuse_changed(self, *, replaceable: bool) -> None:
        """Raise ConfigError for a parameter that DDP does not know, because it was frozen when the
        models were registered, or is new, and, in a process that is `replaceable`, for groups that
        an optimizer's saved state does not fit."""
        for optimizer, now, before in zip(self.optimizers, self._groups_now(), self.groups, strict=False):
            if now != before and replaceable:
                raise ConfigError(REGROUPED.format(optimizer=type(optimizer).__name__, now=now, before=before))
        known, frozen = ({id(each) for each in some} for some in (self.trained, self.frozen))
        for model, wrapper in zip(self.models, self.wrapped, strict=True) if self.ddp_args else ():
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            for name, each in model.named_parameters():
                if each.requires_grad and id(each) not in known and name not in ignored:
                    text = UNFROZEN if id(each) in frozen else NEW
                    raise ConfigError(text.format(name=name, model=type(model).__name__))

    def _keep_modes(self) -> None:
        """Note the modes in which `setup` has left the models."""
        before = self._modes_now()
        for model in self.wrapped:
            if model.training:
                model.train()  # a model may override it, for example to keep its BatchNorm layers in eval mode
        self.modes = {each: mode and each.training for each, mode in before.items()}
        set_modes(self.modes)

    def _modes_now(self) -> dict[nn.Module, bool]:
        return {each: each.training for model in self.wrapped for each in model.modules()}

    def newest_wait_s(self) -> float:
        """Return for how long the newest step that DDP has measured has waited for the gradients of
        other ranks."""
        wrapped = [each for each in self.wrapped if isinstance(each, DistributedDataParallel)]
        for each in wrapped:
            measure_communication(each)  # a new generation has new ones
        return sum(map(exposed_communication_s, wrapped))

    def begin_measuring(self, phase: str) -> None:
        """Reset the registered metric, because a new call begins."""
        if phase in self.metrics:
            self.metrics[phase].reset()

    def measured(self, phase: str) -> dict[str, Any]:
        """The registered metric's values over all workers. All ranks call this."""
        metric = self.metrics.get(phase)
        if metric is None:
            return {}
        value = metric.compute()
        if isinstance(value, dict):
            return value
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
        return {PREFIX[phase] + name: value}

    @contextmanager
    def validating(self, ranks: int) -> Iterator[None]:
        """A context in which all ranks have the same models, in eval mode, with the buffers of rank
        0, whose models are saved. They all begin it together. In it no rank waits for another one,
        because they validate different numbers of batches."""
        with self._buffers_of_rank_0(ranks), self._quiet():
            before = self._modes_now()
            for model in self.wrapped:
                model.eval()
            try:
                yield
            finally:
                set_modes(before)

    @property
    def shares_buffers(self) -> bool:
        """Whether all ranks get the buffers of rank 0 in each step."""
        return self.options.parallel is not None and wrapping.sends_buffers(self.ddp_args) is not False

    def own_buffers(self) -> set[str]:
        """The names of the buffers that each rank has for itself, because a model says so to
        DDP."""
        wrapped = enumerate(self.wrapped)
        return {name_of(number, name) for number, each in wrapped for name in getattr(each, "parameters_to_ignore", ())}

    @contextmanager
    def _buffers_of_rank_0(self, ranks: int) -> Iterator[None]:
        """A context in which the buffers (such as the running statistics of BatchNorm layers) are
        those of rank 0, also if a call between steps has changed them. Afterwards, models have
        their own again if the user has excepted them from that."""
        named = {
            name_of(number, name): each
            for number, model in enumerate(self.models)
            for name, each in model.named_buffers()
        }
        shared = {name: each for name, each in named.items() if name not in self.own_buffers()}
        if ranks == 1 or self.options.parallel is None or not shared:
            yield
            return
        buffers = [] if self.shares_buffers else [*shared.values()]
        copies = [each.clone() for each in buffers]
        broadcast(shared, self.control)
        try:
            yield
        finally:
            for buffer, before in zip(buffers, copies, strict=True):
                buffer.copy_(before)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        quiet = [model for model in self.wrapped if hasattr(model, "require_forward_param_sync")]
        for model in quiet:
            model.require_forward_param_sync = False  # type: ignore[assignment]
        if self.shards is not None:
            self.shards.gather_for_validation()
        try:
            yield
        finally:
            for model in quiet:
                model.require_forward_param_sync = True  # type: ignore[assignment]
            if self.shards is not None:
                self.shards.end_validation()


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set whether modules are in train mode; each comes after those that contain it."""
    for each, mode in modes.items():
        if each.training != mode:
            each.train(mode)


def name_of(model: int, buffer: str) -> str:
    """What errors call a buffer of a model."""
    return f"{buffer} of model {model}"


@torch.no_grad()
def broadcast(tensors: Mapping[str, torch.Tensor], control: Control) -> None:
    """Give all ranks the content of these tensors on rank 0. Small ones are sent together."""
    layout = {name: (tuple(each.shape), str(each.dtype)) for name, each in tensors.items()}
    first: list[Any] = [layout]
    dist.broadcast_object_list(first, src=0)
    if first[0] != layout:
        differ = sorted(name for name, _ in first[0].items() ^ layout.items())
        theirs, mine = (each.get(differ[0], "missing") for each in (first[0], layout))
        raise ConfigError(
            f"the buffer {differ[0]} is {mine} on rank {dist.get_rank()}, and {theirs} on rank 0. In each step and for evaluations, all "
            "ranks get the buffers of rank 0, so these need the same names, shapes and types. Keep what differs in an attribute that is "
            "not a buffer"
        )
    large = [each for each in tensors.values() if each.nbytes >= LARGE]
    small = [each for each in tensors.values() if each.nbytes < LARGE]
    for together in (small, *([each] for each in large)):
        if not together:
            continue
        content = torch.cat([each.reshape(-1).view(torch.uint8) for each in together])
        dist.broadcast(content, src=0)
        control.ensure_whole()
        for each, part in zip(together, content.split([each.nbytes for each in together]), strict=True):
            each.copy_(part.clone().view(each.dtype).view(each.shape))  # a clone, because a view must be aligned


def refuse_wrapped(models: list[Any]) -> None:
    """Raise ConfigError for a model that is wrapped already, although raysgd wraps it."""
    if any(isinstance(each, DistributedDataParallel) for model in models for each in model.modules()):
        raise ConfigError(
            "a registered model is, or holds, a DistributedDataParallel. raysgd wraps models itself, again whenever the workers change, "
            "and then the gradients of this one would not be averaged. Register the module inside: models=model.module"
        )


def check_parts(models: list[Any], optimizers: list[Any], criterion: Any, schedulers: list[Any]) -> None:
    """Raise ConfigError for parts of the wrong kind, or that do not belong together."""
    _check_order(optimizers, schedulers)
    parameters = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
            raise ConfigError(
                f"optimizers must be a torch optimizer or a list or tuple of them, got {shown(optimizer)}: pass an object such "
                "as torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        groups = getattr(optimizer, "param_groups", None) or ()
        steps = {id(parameter) for group in groups for parameter in group["params"]}
        if steps and not steps & parameters:
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} holds {len(steps)} parameters, none of which belongs to a registered "
                "model, so it would train nothing that is registered: create it with the parameters() of a model that you pass "
                "to register(models=...)"
            )
    if criterion is not None and (isinstance(criterion, type) or not callable(criterion)):
        raise ConfigError(
            f"criterion must be a loss function or module, got {shown(criterion)}: pass, for example, nn.MSELoss()"
        )
    for scheduler in schedulers:
        if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"schedulers must be a scheduler or a list or tuple of them, got {shown(scheduler)}: pass an object such as "
                "torch.optim.lr_scheduler.StepLR(optimizer, 10)"
            )
        of = getattr(scheduler, "optimizer", None)
        if of is not None and not any(of is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"the scheduler {type(scheduler).__name__} changes an optimizer that is not registered: create it with one of "
                "those that you pass to register(optimizers=...)"
            )


def strays(models: list[Any], optimizers: list[Any]) -> Iterator[tuple[str, int]]:
    """Yield optimizers with how many of their parameters no registered model has."""
    parameters = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", None) or ()
        if stray := {id(parameter) for group in groups for parameter in group["params"]} - parameters:
            yield type(optimizer).__name__, len(stray)


def _check_order(optimizers: list[Any], schedulers: list[Any]) -> None:
    for name, parts, kind, other in (
        ("optimizers", optimizers, LRScheduler, "schedulers"),
        ("schedulers", schedulers, Optimizer, "optimizers"),
    ):
        wrong = next((type(each).__name__ for each in parts if isinstance(each, kind)), "")
        if wrong:
            raise ConfigError(f"{name} got {wrong}, which is one of the {other}: pass it as {other}=...")


def check_steps_alone(scheduler: Any, freq: str) -> None:
    """Raise ConfigError for a scheduler whose `step` needs an argument."""
    step = getattr(scheduler, "step", None)
    try:
        signature(step).bind() if callable(step) else None
    except ValueError:  # it has no signature
        return
    except TypeError:
        raise ConfigError(
            f"{type(scheduler).__name__}.step needs an argument, such as a metric, which scheduler_step_freq={freq!r} does not pass: "
            "pass scheduler_step_freq='manual', and call trainer.update_scheduler(metric), for example with "
            "trainer.validate()['val_loss']"
        ) from None


def move(batch: Any, device: torch.device) -> Any:
    """Move a batch to the device: tensors, containers, and anything with `.to(device)`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    to: Callable[..., Any] | None = getattr(batch, "to", None)
    if callable(to):
        return to(device)
    if isinstance(batch, dict):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else _rebuilt(type(batch), moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(value, device) for value in batch)
    return batch


def _rebuilt(kind: type, content: dict[Any, Any]) -> Any:
    """Make a dict of a subclass (transformers' BatchEncoding) from its content."""
    try:
        return kind(content)
    except TypeError as error:
        raise ConfigError(
            f"a batch of type {kind.__name__} cannot be rebuilt from its content; give it a .to(device)"
        ) from error

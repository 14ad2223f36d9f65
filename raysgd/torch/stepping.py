"""What `self.zero_grad`, `self.backward` and `self.step` do: they act on the running step, and its
policies with them. Worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, shown
from raysgd.torch.meters import DeviceMeters
from raysgd.torch.parts import Parts
from raysgd.torch.weights import Weigh
from raysgd.torch.wrapping import Exchange
from raysgd.training.operator_base import OperatorBase
from raysgd.training.settings import ReplicaSettings

NOT_CLEARED = (
    "the second step adds its gradients to those of the first one, which were not cleared: call self.zero_grad() before "
    "self.backward(loss), in each step"
)


class Stepping(OperatorBase):
    """The part of torch's operators that makes steps."""

    _parts: Parts
    _weigh: Weigh
    _meter_class = DeviceMeters

    def __init__(self, config: dict[str, Any] | None, settings: ReplicaSettings, rank_info: RankInfo | None) -> None:
        super().__init__(config, settings, rank_info)
        self._in_own_step = self._own_step_made = False  # whether `self.step` runs an optimizer's, and it was made
        self._clears: bool | None = None  # whether gradients are cleared between steps; None before the first one
        self._counted: Any = None  # by the default `train_batch`, for the backward pass that it begins

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, count: Any = None, loss_id: int = 0) -> None:
        """Run the backward pass, with the `loss` scaled for the precision and accumulation.
        `optimizer` is the one that it is for, by default the only one. (`loss_id` is for Apex, if
        its arguments have num_losses.)

        `count` is how many things the loss is a mean over, such as tokens, if these are not
        samples: a number, or a tensor of one. The step's gradient is then the mean over those of
        all batches and workers. Pass it in every call, or in none."""
        step, weigh = self._feed.step, self._weigh
        if optimizer is not None and not hasattr(optimizer, "zero_grad"):
            raise ConfigError(f"self.backward(loss, optimizer) got {shown(optimizer)} as optimizer: pass count=...")
        if self._clears is False:
            self._look_for_gradients()
        count = step.count = self._counted if count is None else count
        for policy in step.policies.weighted:
            loss = policy(step, loss)
        if not weigh.acts and count is None:
            self._parts.precision.backward(loss, optimizer, loss_id=loss_id)
            return
        self._parts.precision.backward(weigh.loss(step, loss), optimizer, loss_id=loss_id)
        weigh.passed()

    def step(self, optimizer: Any = None) -> bool:
        """Clip the gradients, and apply the step of the `optimizer` (by default the only one). Do
        nothing before the last batch of an accumulation window. Return whether the step was made,
        and neither awaited nor left out."""
        if not hasattr(optimizer, "step"):
            optimizer = self._only_optimizer(optimizer)
        step, precision, exchange = self._feed.step, self._parts.precision, self._parts.exchange
        if not step.closing:
            for policy in step.policies.awaits:
                policy(step, optimizer)
            return False
        for policy in step.policies.check:
            policy(step, optimizer)
        if type(exchange) is not Exchange:
            exchange.finish(optimizer)
        if step.policies.gradients:
            precision.unscale(optimizer)
            if not all(policy(step, optimizer) for policy in step.policies.gradients):
                precision.leave_out(optimizer)
                step.outcome = "skipped" if step.outcome == "open" else step.outcome
                return False
        # Without this hook, an optimizer cannot say whether a loss scaler has called it.
        self._in_own_step, self._own_step_made = True, not hasattr(optimizer, "register_step_pre_hook")
        try:
            precision.step(optimizer)
        finally:
            self._in_own_step = False
        if not self._own_step_made and step.outcome == "open":  # by a gradient scaler
            step.outcome = "skipped"
        self._clears = bool(self._clears)
        return self._own_step_made

    def _look_for_gradients(self) -> None:
        """Warn if the backward pass of the second step begins with the gradients of the first
        one."""
        self._clears, optimizers = True, self._parts.optimizers
        if len(optimizers) > 1 or self._feed.step.place > 0 or self._parts.options.parallel == "fsdp":
            return
        for parameter in (each for group in optimizers[0].param_groups for each in group["params"]):
            if parameter.grad is not None and not parameter.grad.is_sparse and bool(parameter.grad.any()):
                self._warn_once(NOT_CLEARED)
                return

    def zero_grad(self, optimizer: Any = None) -> None:
        """Clear the gradients of one `optimizer`, or of all. Do nothing after the first batch of an
        accumulation window."""
        step, exchange = self._feed.step, self._parts.exchange
        for policy in step.policies.cleared:
            policy(step)
        if step.place > 0:
            return
        for each in self._parts.optimizers if optimizer is None else [optimizer]:
            if type(exchange) is not Exchange:  # a batch whose step was left out
                exchange.finish(each)
            each.zero_grad()

    def _only_optimizer(self, given: Any = None) -> Any:
        if given is not None:
            raise ConfigError(
                f"self.step() takes an optimizer, got {shown(given)}. It makes the step with gradients that self.backward(loss) has "
                "computed, so it passes no closure on. Call the step(closure) of the optimizer itself"
            )
        optimizers = self._parts.optimizers
        if len(optimizers) != 1:
            raise ConfigError(f"{len(optimizers)} optimizers are registered: pass one of them, step(optimizer)")
        return optimizers[0]

    # -- steps that user code makes with `optimizer.step()` -------------------------------------------

    def _watch_steps(self, optimizers: Sequence[Any]) -> None:
        """Refuse steps that user code makes itself, if an option acts in `self.step`."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        direct, self._own_step_made = not self._in_own_step, True
        if not direct:
            return None
        if option := self._policies.option:
            raise ConfigError(_direct_step(option, with_closure=closure_in(args, kwargs) is not None))
        return after_gradients(args, kwargs, lambda: self._check_direct(optimizer))

    def _check_direct(self, optimizer: Any) -> None:
        step = self._feed.step
        for policy in step.policies.direct:
            policy(step, optimizer)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure that a step got, if it got one. The first argument is the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def after_gradients(args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]) -> Any:
    """In a hook before a step: call `check` when the step's gradients are there, and return what
    the hook returns. A closure computes them during the step, and may be called several times."""
    closure = closure_in(args, kwargs)
    if closure is None:
        return check()

    def checked() -> Any:
        loss = closure()
        check()
        return loss

    return args[:1], {**kwargs, "closure": checked}


def _direct_step(option: str, *, with_closure: bool) -> str:
    if with_closure:
        return (
            f"{option} acts in self.step(), and this operator passes a closure to the step of its optimizer, which self.step() cannot "
            "do: leave one of them out"
        )
    return (
        f"{option} acts in self.step(), and this operator calls optimizer.step() itself. Write instead:\n"
        "    self.zero_grad()\n    self.backward(loss)\n    self.step()\n"
        "each with the optimizer, if there are several, or leave the option out"
    )

"""What `self.zero_grad`, `self.backward` and `self.step` do: they act on the running step, and its
policies with them. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from raysgd.errors import ConfigError, shown
from raysgd.replica.operator_base import OperatorBase
from raysgd.replica.steps.step import Step
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.internals import TorchInternals
from raysgd.torch.registered import Registered
from raysgd.torch.step.closures import after_gradients, closure_in

NOT_CLEARED = (
    "the second step adds its gradients to those of the first one, which were not cleared. raysgd counts the batches for "
    "TrainingOptions(accumulate=%d). Call self.zero_grad(), self.backward(loss) and self.step() in each batch"
)


class Stepping(OperatorBase):
    """The part of torch's operators that makes steps."""

    _registered: Registered
    _internals: TorchInternals
    _has_own_steps: ClassVar[bool] = False  # whether the class itself clips gradients and applies the precision

    def __init__(self, config: dict[str, Any] | None, internals: TorchInternals) -> None:
        super().__init__(config, internals)
        self._in_own_step = self._own_step_made = False  # whether `self.step` runs an optimizer's, and it was made
        self._clears: bool | None = None  # whether gradients are cleared between windows; None before the first one

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, count: Any = None, loss_id: int = 0) -> None:
        """Run the backward pass, with the `loss` scaled for the precision and accumulation.
        `optimizer` is the one that it is for, by default the only one. (`loss_id` is for Apex, if
        its arguments have num_losses.)

        `count` is how many things the loss is a mean over, such as tokens, if these are not
        samples: a number, or a tensor of one. The step's gradient is then the mean over those of
        all batches and workers. Pass it in every call, or in none."""
        internals = self._internals
        step, weigh = internals.feed.step, internals.weigh
        if optimizer is not None and not hasattr(optimizer, "zero_grad"):
            raise ConfigError(f"self.backward(loss, optimizer) got {shown(optimizer)} as optimizer: pass count=...")
        if step.error is not None:
            raise step.error
        count = step.count = internals.counted if count is None else count
        try:
            if self._clears is False:
                self._look_for_gradients()
            for policy in step.policies.on_backward:
                loss = policy(step, loss)
            if not weigh.acts and count is None:
                self._registered.precision.backward(loss, optimizer, loss_id=loss_id)
                return
            self._registered.precision.backward(weigh.loss(step, loss), optimizer, loss_id=loss_id)
            weigh.passed()
        except Exception as error:
            note_peer_error(self._registered, step, error)
            raise

    def step(self, optimizer: Any = None) -> bool:
        """Clip the gradients, and apply the step of the `optimizer` (by default the only one). Do
        nothing before the last batch of an accumulation window. Return whether the step was made,
        and neither awaited nor left out."""
        if not hasattr(optimizer, "step"):
            optimizer = self._only_optimizer(optimizer)
        step, precision, exchange = self._internals.feed.step, self._registered.precision, self._registered.exchange
        if step.error is not None:
            raise step.error
        try:
            if not step.closing:
                for policy in step.policies.on_partial_step:
                    policy(step, optimizer)
                return False
            for policy in step.policies.on_whole_step:
                policy(step, optimizer)
            if type(exchange) is not Exchange:
                exchange.finish(optimizer)
            if step.policies.on_gradients:
                precision.unscale(optimizer)
                if not all(policy(step, optimizer) for policy in step.policies.on_gradients):
                    precision.leave_out(optimizer)
                    step.outcome = "skipped" if step.outcome == "open" else step.outcome
                    return False
            # Without this hook, an optimizer cannot say whether a loss scaler has called it.
            self._in_own_step, self._own_step_made = True, not hasattr(optimizer, "register_step_pre_hook")
            precision.step(optimizer)
        except Exception as error:
            note_peer_error(self._registered, step, error)
            raise
        finally:
            self._in_own_step = False
        if not self._own_step_made and step.outcome == "open":  # by a gradient scaler
            step.outcome = "skipped"
        self._clears = bool(self._clears)
        return self._own_step_made

    def _look_for_gradients(self) -> None:
        """Warn if the backward pass of the second window begins with the gradients of the first
        one."""
        self._clears, optimizers, window = True, self._registered.optimizers, self._batches_per_step
        alone = len(optimizers) == 1 and self._registered.options.parallel != "fsdp"
        if window == 1 or not alone or self._internals.feed.step.place > 0:
            return
        for parameter in (each for group in optimizers[0].param_groups for each in group["params"]):
            if parameter.grad is not None and not parameter.grad.is_sparse and bool(parameter.grad.any()):
                self._internals.warn_once(NOT_CLEARED, window)
                return

    def zero_grad(self, optimizer: Any = None) -> None:
        """Clear the gradients of one `optimizer`, or of all. Do nothing after the first batch of an
        accumulation window."""
        step, exchange = self._internals.feed.step, self._registered.exchange
        for policy in step.policies.on_zero_grad:
            policy(step)
        if step.place > 0:
            return
        for each in self._registered.optimizers if optimizer is None else [optimizer]:
            if type(exchange) is not Exchange:  # a batch whose step was left out
                exchange.finish(each)
            each.zero_grad()

    def _only_optimizer(self, optimizer: Any = None) -> Any:
        if optimizer is not None:
            raise ConfigError(
                f"self.step() takes an optimizer, got {shown(optimizer)}. It makes the step with gradients that self.backward(loss) has "
                "computed, so it passes no closure on. Call the step(closure) of the optimizer itself"
            )
        optimizers = self._registered.optimizers
        if len(optimizers) != 1:
            raise ConfigError(f"{len(optimizers)} optimizers are registered: pass one of them, step(optimizer)")
        return optimizers[0]

    # -- the steps of optimizers ----------------------------------------------------------------------

    def _watch_steps(self, optimizers: Sequence[Any]) -> None:
        """Act before each step of an optimizer. Refuse those that user code makes itself, if an
        option acts in `self.step`."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        direct, self._own_step_made = not self._in_own_step, True
        if not direct:
            if self._internals.whole is not None:
                self._internals.whole.look_again()
            return None
        if not self._has_own_steps and (option := self._internals.policies.option):
            raise ConfigError(_direct_step(option, with_closure=closure_in(args, kwargs) is not None))
        if self._registered.shards is not None and closure_in(args, kwargs) is not None:
            raise ConfigError(
                f"with parallel='fsdp' a closure cannot be passed to {type(optimizer).__name__}.step(), because each call of it needs all "
                "ranks, and they could call it different numbers of times: compute the gradients before the step"
            )
        return after_gradients(args, kwargs, lambda: self._check_direct(optimizer))

    def _note_steps(self, optimizers: Sequence[Any]) -> None:
        """Note each step that an optimizer makes."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        internals = self._internals
        step = internals.feed.step
        internals.position.applied += 1
        step.outcome = "applied"
        for policy in step.policies.after_step:
            policy(step, optimizer)

    def _check_direct(self, optimizer: Any) -> None:
        step = self._internals.feed.step
        for policy in step.policies.on_other_step:
            policy(step, optimizer)
        if self._has_own_steps:
            return
        if step.error is not None:
            raise step.error
        for policy in step.policies.on_direct_step:
            policy(step, optimizer)


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


def note_peer_error(registered: Registered, step: Step, error: Exception) -> None:
    """Note the error of a failed peer, which user code may catch: this rank has not got all
    gradients. (No method, because operators have names of their own.)"""
    if registered.control.is_interruption(error):
        step.error = error

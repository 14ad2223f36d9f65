"""What `self.zero_grad`, `self.backward` and `self.step` do: they act on the running step, and its
policies with them. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysgd.errors import ConfigError
from raysgd.torch.parts import Parts
from raysgd.torch.wrapping import Exchange
from raysgd.training.step import Policy, Step, acting

if TYPE_CHECKING:
    from raysgd.torch.precision import Precision


class StepPolicy(Policy):
    """Adds what the operator's helpers call. By default, all methods do nothing.

    option  what the user has passed, if it acts in the helpers only, so that torch's own methods
            must not be used
    """

    option = ""

    def cleared(self, step: Step) -> None:
        """Called by `self.zero_grad`, which clears nothing after the first batch of a step."""

    def weighted(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        """Called by `self.backward`. Return the loss whose gradients are computed."""
        return loss

    def awaits(self, step: Step, optimizer: Any) -> None:
        """Called by `self.step` if the step needs further batches."""

    def check(self, step: Step, optimizer: Any) -> None:
        """Called by `self.step` first, with the gradients as the backward pass has left them."""

    def gradients(self, step: Step, optimizer: Any) -> bool:
        """Called by `self.step` with the gradients of all ranks, not scaled. Return whether to make
        the step: alike on all ranks."""
        return True

    def direct(self, optimizer: Any) -> None:
        """Called before a step that user code makes with `optimizer.step()`."""


class Stepping:
    """Owns the policies of an operator, and knows whether a step of an optimizer is one of
    `self.step`."""

    def __init__(self, policies: Sequence[Policy], precision: Precision, parts: Parts) -> None:
        self._precision, self._parts = precision, parts
        self._exchanges = type(parts.exchange) is not Exchange
        self._cleared, self._weighted, self._awaits, self._check, self._gradients, self._direct = (
            acting(policies, StepPolicy, name)
            for name in ("cleared", "weighted", "awaits", "check", "gradients", "direct")
        )
        self._option = next((each.option for each in policies if isinstance(each, StepPolicy) and each.option), "")
        self._in_step = self._made = False

    def zero_grad(self, step: Step, optimizers: Sequence[Any]) -> None:
        for policy in self._cleared:
            policy(step)
        if step.place > 0:
            return
        for optimizer in optimizers:
            if self._exchanges:  # a batch whose step was left out
                self._parts.exchange.finish(optimizer)
            optimizer.zero_grad()

    def backward(self, step: Step, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> None:
        for policy in self._weighted:
            loss = policy(step, loss)
        self._precision.backward(loss, optimizer, loss_id=loss_id)

    def step(self, step: Step, optimizer: Any) -> bool:
        """Make the optimizer's step if this is the last batch of `step`, and no policy leaves it
        out. Return whether it was made."""
        if not step.closing:
            for policy in self._awaits:
                policy(step, optimizer)
            return False
        for policy in self._check:
            policy(step, optimizer)
        if self._exchanges:
            self._parts.exchange.finish(optimizer)
        if self._gradients:
            self._precision.unscale(optimizer)
            if not all(policy(step, optimizer) for policy in self._gradients):
                self._precision.leave_out(optimizer)
                step.skip()
                return False
        # Without this hook, an optimizer cannot say whether a loss scaler has called it.
        self._in_step, self._made = True, not hasattr(optimizer, "register_step_pre_hook")
        try:
            self._precision.step(optimizer)
        finally:
            self._in_step = False
        return self._made

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Refuse steps that user code makes with `optimizer.step()`, if an option acts in
        `self.step`."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        direct, self._made = not self._in_step, True
        if not direct:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if self._option:
            raise ConfigError(_direct_step(self._option, with_closure=callable(closure)))
        if not callable(closure):
            return self._check_direct(optimizer)

        def checked() -> Any:  # it computes the gradients during the step, and may be called several times
            loss = closure()
            self._check_direct(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": checked}

    def _check_direct(self, optimizer: Any) -> None:
        for policy in self._direct:
            policy(optimizer)


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

"""Precisions: autocast for the forward pass, loss scaling for the backward pass and the step.
Worker."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from raysgd.errors import ConfigError
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.foreign import keep_found

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class Precision(Policy):
    """Full precision (fp32), and the base of the others. Each operator has one; it owns the scaler,
    if there is one.

    `key` is the state's name in checkpoints.
    """

    key = ""

    @classmethod
    def for_run(cls, run: Any) -> Any:
        return run.registered.precision

    def prepare(self, models: list[Any], optimizers: list[Any], args: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The models and optimizers to use. Called at registration, before the models are
        wrapped."""
        return models, optimizers

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING

    def output(self, value: Any, *_: Any) -> Any:
        """A tensor of an evaluation as users get it: of mixed precision, in fp32."""
        return value

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        loss.backward()

    def unscale(self, optimizer: Any) -> None:
        """Unscale the gradients. Called before they are clipped."""

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def leave_out(self, optimizer: Any) -> None:
        """Called instead of `step`, after `unscale`, for a step that is left out."""

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        """What the optimizer's step changes; gradient clipping uses the gradients of these."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def skipped(self) -> int:
        """How many steps of this call were skipped because gradients were not finite."""
        return 0

    def forget_skipped(self) -> None:
        """Reset what `skipped` returns, because a call begins."""

    def state(self) -> dict[str, Any] | None:
        return None

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class Autocast(Precision):
    """Autocast to the type `dtype`. `name` is what the trainer's `precision` calls it."""

    name: str
    dtype: torch.dtype

    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self._trained_with = False

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        self._trained_with |= torch.is_grad_enabled()  # a validation does not count
        return torch.autocast(self._type, dtype=self.dtype)

    def output(self, value: Any, *_: Any) -> Any:
        return value.float() if getattr(value, "dtype", None) == self.dtype else value

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        self._check_used(direct=False)

    def on_direct_step(self, step: Step, optimizer: Any) -> None:
        self._check_used(direct=True)

    def _check_used(self, *, direct: bool) -> None:
        """Raise ConfigError if the user's code makes a step without using this precision. `direct`
        is whether it calls the optimizer's own `step`."""
        if not self._trained_with:
            raise ConfigError(
                f"precision={self.name!r} was passed, but this operator computes its loss outside self.autocast(), so it would train in "
                "fp32. Compute the forward pass and the loss inside `with self.autocast():`, or leave precision out"
            )


class Bf16(Autocast):
    """Autocast to bfloat16. Its range needs no loss scaling."""

    name, dtype = "bf16", torch.bfloat16


class Scaler(torch.amp.GradScaler):
    """Notes whether the user's code uses it, and whose gradients are `unscaled`."""

    scaled = stepping = False

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.unscaled: set[int] = set()

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        self.unscaled.add(id(optimizer))

    def begin_again(self, optimizer: Any) -> None:
        """Let the optimizer make one more step with this scale."""
        keep_found(self, optimizer)
        self.unscaled.discard(id(optimizer))

    def scale(self, outputs: Any) -> Any:
        self.scaled = True
        return super().scale(outputs)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False


class Fp16(Autocast):
    """Autocast to float16, with loss scaling. The scale changes only between batches, so several
    optimizers can share it."""

    key = "amp_native"
    name, dtype = "fp16", torch.float16

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scaler = Scaler(device.type)
        self._stepped: set[int] = set()
        self._one = torch.ones((), device=device)
        self._skipped = torch.zeros((), device=device)

    def _check_used(self, *, direct: bool) -> None:
        super()._check_used(direct=direct)
        called = "loss.backward()" if not self.scaler.scaled else "optimizer.step()"
        if not self.scaler.scaled or (direct and not self.scaler.stepping):
            raise ConfigError(
                f"precision='fp16' was passed, but this operator calls {called} itself, which leaves out the scaling of the loss. Call "
                "self.backward(loss) and self.step(optimizer) instead, or use precision='bf16', which needs none"
            )

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        self.scaler.scale(loss).backward()

    def on_backward(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        if step.committed:  # user code makes it without a batch of the iterator, and so made the one before
            self.update()
        return loss

    def reset(self) -> None:
        self.update()

    after_loop = reset

    def unscale(self, optimizer: Any) -> None:
        self._begin_again(optimizer)
        if id(optimizer) not in self.scaler.unscaled:  # by the user's code
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        self._begin_again(optimizer)
        self._stepped.add(id(optimizer))
        self.scaler.step(optimizer)

    def _begin_again(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:
            self._stepped.discard(id(optimizer))
            self.scaler.begin_again(optimizer)

    def leave_out(self, optimizer: Any) -> None:
        self._stepped.add(id(optimizer))  # infinite gradients make the scale smaller, as in a step

    def end_step(self, step: Step) -> None:
        """Change the scale once in each step, no matter how many optimizers stepped in it."""
        if step.committed:
            self.update()

    def put_back(self, step: Step, value: None) -> None:
        """Forget the steps that optimizers have begun. The scale is that of the step's
        beginning."""
        state, scaled = self.scaler.state_dict(), self.scaler.scaled
        self.scaler = Scaler(self._type)
        self.scaler.scaled = scaled
        self.scaler.load_state_dict(state)
        self._stepped.clear()

    def update(self) -> None:
        """Change the scale for the next backward pass, if an optimizer has made a step since the
        last one."""
        if self._stepped:
            before = self.scaler.scale(self._one)
            self.scaler.update()
            # The scale decreases exactly when a step was skipped. The sum stays on the device, so the CPU need not wait.
            self._skipped = self._skipped + (self.scaler.scale(self._one) < before)
        self._stepped.clear()
        self.scaler.unscaled.clear()

    def skipped(self) -> int:
        return int(self._skipped.item())

    def forget_skipped(self) -> None:
        self._skipped = torch.zeros_like(self._skipped)

    def state(self) -> dict[str, Any] | None:
        return dict(self.scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


class Apex(Precision):
    """Mixed precision with NVIDIA Apex's amp, if an Apex that has it is installed."""

    key = "amp_apex"

    def __init__(self) -> None:
        self.amp = find_apex()
        self._optimizers: list[Any] = []

    def prepare(self, models: list[Any], optimizers: list[Any], args: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        models, optimizers = self.amp.initialize(models, optimizers, **args)
        self._optimizers = list(optimizers)
        return list(models), list(optimizers)

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        return list(self.amp.master_params(optimizer))

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        optimizers = self._optimizers if optimizer is None else optimizer
        with self.amp.scale_loss(loss, optimizers, loss_id=loss_id) as scaled:
            scaled.backward()

    def state(self) -> dict[str, Any] | None:
        return dict(self.amp.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


def find_apex() -> Any:
    """Import Apex's amp module. Raise an ImportError that says what is installed instead."""
    try:
        return importlib.import_module("apex.amp")
    except ImportError as error:
        problem = "no package named apex is installed"
        if error.name != "apex":
            problem = (
                f"the installed apex cannot be used ({error}): it is the other package of that name, on PyPI, or an Apex without "
                "amp, which was removed in 2025, or it was built for another torch"
            )
        raise ImportError(
            f"precision='apex' needs NVIDIA Apex, but {problem}. NVIDIA Apex is not on PyPI: build a release that still has "
            "apex.amp (25.02 or older) from NVIDIA's sources, or use precision='fp16', which needs only torch"
        ) from error


def make_precision(name: str, device: torch.device) -> Precision:
    """Make the precision that a trainer's `precision` names."""
    if name in ("fp32", "apex"):
        return Apex() if name == "apex" else Precision()
    return {"bf16": Bf16, "fp16": Fp16}[name](device)

"""What happens between the backward pass and the step: weights of ranks, accumulation windows, and gradient clipping. Worker.

An accumulation window is `accumulate` batches that share one optimizer step, or fewer at the end of an epoch or call.
Its gradients are the mean over all its samples: the same as of one batch that holds them all, for a loss that is a mean
over samples. The pieces of one batch (`RankPart.pieces`) are a window, too.

Ranks exchange the mean of their gradients. Where they have different numbers of samples, each rank multiplies its gradients
by its weight as they arrive at the parameters, which works for any code that runs the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch.foreign import content_version, multiply_all, run_after_backward
from raysgd.torch.guard import StepGuard
from raysgd.torch.monitor import Monitor
from raysgd.torch.options import TrainingOptions
from raysgd.torch.parts import Parts
from raysgd.torch.precision import Precision
from raysgd.torch.schedules import steps_of
from raysgd.torch.wrapping import Exchange
from raysgd.training.feed import Drawn

CLIPS = "changes gradients between the backward pass and the step: clip with TrainingOptions(clip_norm=...)"

STEPS_SCHEDULE = (
    "steps its scheduler: pass scheduler_step_freq='batch' or 'step', so that the trainer steps it after the last piece"
)


class Gradients:
    """Owns the open window, and the hooks that weight gradients. The feed calls `begin` before each batch for which there is
    something to prepare; the operator's helpers call the rest.

    Without a feed, as in a validation or in a user's function, every batch is a window of its own.
    """

    def __init__(
        self,
        options: TrainingOptions,
        precision: Precision,
        parts: Parts,
        monitor: Monitor,
        *,
        exact: bool = False,
        in_pieces: bool = False,
        guard: StepGuard,
    ) -> None:
        self.guard = guard
        self._options, self._precision, self._parts, self._monitor = options, precision, parts, monitor
        self._accumulates, self._exact = options.accumulate > 1, exact
        self._exchanges = type(parts.exchange) is not Exchange
        self._in_pieces = in_pieces
        self._untested = in_pieces and not self._accumulates  # whether the user's code may be unfit for pieces
        self._needs_helpers = _option_in_helpers(options, guard, in_pieces=in_pieces)
        self._hooks: list[Any] = []
        self._held = False
        # For pieces: versions of the gradients after a backward pass; whether gradients have arrived in this window and piece, a
        # step was left out, a backward pass is running, and this batch shows whether the user's code is fit for pieces.
        self._seen: list[int] = []
        self._tested = self._cleared = False
        self._arrived = self._here = self._skipped = self._in_backward = False
        clips = options.clip_norm is not None or options.clip_value is not None
        self._reads_gradients = clips or monitor.needs_gradients
        self._stepping = self._made = False
        self._schedules: tuple[list[Any], list[Any]] = [], []
        self._stepped_schedules: list[Any] = []  # how many steps each has made, before a piece that is not the last one
        self.abandon()

    @property
    def takes_pieces(self) -> bool:
        """Return whether a batch can come in pieces."""
        return self._in_pieces

    def _schedule_steps(self) -> list[Any]:
        return [steps_of(each) for each in self._parts.schedulers]

    def abandon(self) -> None:
        """Forget the open window, because it has ended or its batches will be drawn again."""
        self._position, self._closing = 0, True
        self._samples, self._total, self._usual = 1.0, 0.0, 1.0
        self.while_exchanging: Callable[[], None] | None = None  # called once for each backward pass
        self._witness: torch.Tensor | None = None
        self._weigh(1.0)
        self._here = self._skipped = self._in_backward = False
        if self._held:
            self._exchange_gradients(True)

    def begin(self, drawn: Drawn, position: int, closing: bool) -> bool:
        """Prepare for a batch, which is at this position of its window; `closing` is whether it is the last one. Return whether
        there is nothing to prepare for a usual batch after it."""
        pieces = not self._accumulates and (position > 0 or not closing)
        if pieces and position > 0 and self._schedule_steps() != self._stepped_schedules:
            raise refusal(STEPS_SCHEDULE)
        self._stepped_schedules = self._schedule_steps() if pieces and not closing else []
        self._weigh(drawn.weight if self._exact else 1.0, watch=pieces or self._untested)
        self._tested, self._untested, self._cleared = self._untested, False, False
        self._position, self._closing = position, closing
        self._here = self._skipped = self._in_backward = False
        if position == 0:
            self._arrived, self._witness = False, None
            self._schedules = self._of_schedules() if self._accumulates else ([], [])
        if self._accumulates:
            self._measure(drawn)
        if self._held or not closing:
            self._exchange_gradients(closing)
        return closing and not (self._hooks or self._accumulates)

    def _of_schedules(self) -> tuple[list[Any], list[Any]]:
        """Return copies of what schedulers change: their own states, and the values of parameter groups."""
        states = [copy.deepcopy(each.state_dict()) for each in self._parts.schedulers]
        groups = [group for each in self._parts.optimizers for group in each.param_groups] if states else []
        return states, [copy.deepcopy({name: group[name] for name in group if name != "params"}) for group in groups]

    def undo_schedules(self) -> None:
        """Undo the steps of schedulers in a window that will be processed again."""
        states, values = self._schedules
        self._schedules = [], []
        for scheduler, state in zip(self._parts.schedulers if states else [], states, strict=True):
            scheduler.load_state_dict(state)
        groups = [group for each in self._parts.optimizers for group in each.param_groups] if states else []
        for group, before in zip(groups, values, strict=True):
            group.update(before)

    def _measure(self, drawn: Drawn) -> None:
        """Count this batch's samples, for its part of the window's gradients: those of all ranks, if gradients are weighted."""
        self._samples = float((drawn.rows if self._exact else None) or samples_in(drawn.batch))
        if self._position == 0:
            self._total, self._usual = 0.0, self._samples * self._options.accumulate
        if drawn.whole:
            self._total += self._samples
        if self._closing and self._total != self._usual:
            self._shorten(self._position > 0)

    def _weigh(self, weight: float, *, watch: bool = False) -> None:
        """Multiply the gradients of the following backward passes by `weight`, and with `watch`, follow what is done with them."""
        self._weight, self._watching = weight, watch
        needed = weight != 1.0 or watch
        if needed == bool(self._hooks):
            return
        while self._hooks:
            self._hooks.pop().remove()
        if not needed:
            return
        shards = self._parts.shards
        found = shards.full_parameters() if shards else [p for model in self._parts.models for p in model.parameters()]
        for each in {id(parameter): parameter for parameter in found}.values():
            if each.is_floating_point() or each.is_complex():
                # A tensor takes a hook only while it requires a gradient, and user code may unfreeze it before its backward pass.
                trained = each.requires_grad
                each.requires_grad_(True)
                self._hooks.append(each.register_hook(self._weighted))
                each.requires_grad_(trained)

    def _weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._watching and not self._in_backward:
            self._backward_begins()
        return gradient if self._weight == 1.0 else gradient * self._weight

    # -- pieces of a batch ----------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        if self._skipped:
            raise refusal(
                "makes a step and then computes gradients with the new weights: step after all backward passes"
            )
        if self._tested and not self._cleared:
            raise refusal(
                "does not clear its gradients with self.zero_grad() before the backward pass: call self.zero_grad(), "
                "self.backward(loss) and self.step(optimizer) instead of torch's"
            )
        if self._position and not self._here:
            self._check_unchanged(
                "clears or changes gradients between two batches: let the optimizer's zero_grad clear them"
            )
        self._arrived = self._here = self._in_backward = True
        run_after_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._in_backward = False
        run_after_backward(self._note_versions)  # after the exchange of gradients, which ends in such a call, too

    def _note_versions(self) -> None:
        self._seen = self._versions()

    def _versions(self) -> list[int]:
        """Return numbers that change when a gradient is changed in place."""
        parameters = [p for each in self._parts.optimizers for p in self._precision.parameters(each)]
        return [-1 if each.grad is None else content_version(each.grad) for each in parameters]

    def _check_unchanged(self, found: str) -> None:
        if self._arrived and self._versions() != self._seen:
            raise refusal(found)

    def _skip(self) -> None:
        """Leave out a step, because another piece follows."""
        self._check_unchanged(CLIPS)
        self._skipped = True

    def _shorten(self, begun: bool) -> None:
        """Give the gradients so far more weight, because this window has fewer samples than usual. This must happen
        before the ranks exchange gradients, since another rank's window can have another number of samples."""
        if begun:
            factor, shards = self._usual / self._total, self._parts.shards
            for optimizer in self._parts.optimizers:
                _scale([each.grad for each in self._precision.parameters(optimizer)], factor)
            _scale(shards.unexchanged_gradients() if shards else [], factor)
        self._usual = self._total

    def zero_grad(self, optimizers: Sequence[Any]) -> None:
        self._cleared = True
        if self._position == 0:
            for optimizer in optimizers:
                if self._exchanges:  # a batch whose step was left out
                    self._parts.exchange.finish(optimizer)
                optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> None:
        if self.guard.on:
            self.guard.see_loss(loss, self._weight * (self._samples if self._accumulates else 1.0))
        if self._accumulates:
            self._check_witness()
            loss = loss * (self._samples / self._usual)
        if self.while_exchanging is not None and loss.requires_grad:
            loss.register_hook(self._exchange_will_begin)
        self._precision.backward(loss, optimizer, loss_id=loss_id)

    def _exchange_will_begin(self, gradient: torch.Tensor) -> None:
        """Called when a backward pass begins. When it ends, autograd runs the queued callbacks in order. DDP waits for its all-reduce
        in such a callback, which it queues with the last gradient, so this one runs during the all-reduce."""
        run_after_backward(self._call_while_exchanging)

    def _call_while_exchanging(self) -> None:
        if self.while_exchanging is not None:
            with torch.enable_grad():  # as in the loop
                self.while_exchanging()

    def step(self, optimizer: Any) -> bool:
        """Clip the gradients and apply the step, if the window ends with this batch. Return whether it was made."""
        if not self._closing:
            if self._watching:
                self._skip()
            self._choose_witness(optimizer)
            return False
        if self._watching and not self._parts.exchange.at_the_step:
            self._check_unchanged(CLIPS)
        if self._exchanges:
            self._parts.exchange.finish(optimizer)
        self._precision.check_step(optimizer, direct=False)
        if self._reads_gradients or self.guard.on:
            self._precision.unscale(optimizer)
            if self.guard.on and self.guard.refuses(optimizer):
                self._precision.leave_out(optimizer)
                self.stepped()
                return False
            self._measure_gradients(optimizer)
            self._clip(optimizer)
        # Without this hook, an optimizer cannot say whether a loss scaler has called it.
        self._stepping, self._made = True, not hasattr(optimizer, "register_step_pre_hook")
        try:
            self._precision.step(optimizer)
        finally:
            self._stepping = False
        return self._made

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Refuse steps that user code makes with `optimizer.step()`, if an option acts in `self.step`."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        direct, self._made = not self._stepping, True
        if not direct:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if self._needs_helpers:
            raise ConfigError(_direct_step(self._needs_helpers, with_closure=callable(closure)))
        if not callable(closure):
            return self._check_direct_step(optimizer)

        def checked() -> Any:  # it computes the gradients during the step, and may be called several times
            loss = closure()
            self._check_direct_step(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": checked}

    def _check_direct_step(self, optimizer: Any) -> None:
        self._precision.check_step(optimizer, direct=True)
        if self._monitor.needs_gradients and getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "GradientNormMonitor was passed, but a fused optimizer unscales the gradients of precision='fp16' only inside its "
                "step: call self.step(optimizer), which unscales them before, instead of the scaler's step"
            )
        self._measure_gradients(optimizer)

    def _measure_gradients(self, optimizer: Any) -> None:
        if self._monitor.needs_gradients:
            parameters, skips = self._precision.parameters(optimizer), self._precision.key == "amp_native"
            self._monitor.see_gradients(optimizer, parameters, skips=skips)

    def _clip(self, optimizer: Any) -> None:
        parameters = self._precision.parameters(optimizer)
        if self._options.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._options.clip_value)
        if self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._options.clip_norm)

    def stepped(self) -> None:
        """Note that an optimizer has stepped."""
        self._skipped, self._arrived = True, False

    def _exchange_gradients(self, on: bool) -> None:
        """Let the next backward pass average the gradients over the ranks, or not. It does so once for each window."""
        self._held = not on
        self._parts.exchange.hold(self._held)
        for model in self._parts.wrapped:
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = on  # type: ignore[assignment]
            elif hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def _choose_witness(self, optimizer: Any) -> None:
        """Remember a parameter that has a gradient, to notice if user code clears it before the window ends."""
        parameters = self._precision.parameters(optimizer)
        self._witness = next((each for each in parameters if each.grad is not None), None)

    def _check_witness(self) -> None:
        if self._position and self._witness is not None and self._witness.grad is None:
            raise ConfigError(
                f"gradients were cleared in the middle of {self._options.accumulate} batches that share one step: call "
                "self.zero_grad() instead of optimizer.zero_grad(); it clears them only where a window begins"
            )


def _option_in_helpers(options: TrainingOptions, guard: StepGuard, *, in_pieces: bool) -> str:
    """Return the first option that acts in the operator's helpers, "" if there is none."""
    asked = {
        f"accumulate={options.accumulate}": options.accumulate > 1,
        f"clip_norm={options.clip_norm}": options.clip_norm is not None,
        f"clip_value={options.clip_value}": options.clip_value is not None,
        f"on_nonfinite={options.on_nonfinite!r}": options.on_nonfinite is not None,
        "skip_step()": guard.on,
        "ElasticConfig(batch='global')": in_pieces,
    }
    return next((option for option, is_used in asked.items() if is_used), "")


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


def refusal(found: str) -> ConfigError:
    """Return the error about an operator whose batches cannot come in pieces."""
    return ConfigError(
        "ElasticConfig(batch='global') lets each worker process its batch in several pieces when there are fewer workers, with one "
        f"step after the last of them, and this operator {found}, or use batch='per_worker'"
    )


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    multiply_all([each for each in gradients if each is not None], factor)


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has: the length of the first tensor in it, or 1 if there is none."""
    return _length(batch) or 1


def _length(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return next((length for each in part if (length := _length(each)) is not None), None)
    return None

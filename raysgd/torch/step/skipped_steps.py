"""Leave out an optimizer step, on all ranks together, whose gradients are not finite. Worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from raysgd.core.control import Control
from raysgd.errors import ConfigError, NonFiniteError
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.group.sharing import gathered_objects, summed
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.registered import Registered

MOST_LEFT_OUT = 50
ADVICE = {
    "raise": "Look at these samples and at the loss, or pass on_nonfinite='skip' to leave out such steps",
    "skip": f"on_nonfinite='skip' allows {MOST_LEFT_OUT - 1} such batches in a row: load the newest checkpoint, and use a smaller "
    "learning rate, clip_norm, or precision='bf16' or 'fp32'",
}


# What one rank knows about a step with gradients that are not finite: the names of their parameters (with FSDP, of those of which it
# has such a part), the loss (None if the operator called `loss.backward()` itself), and the indices of its samples, if they are known.
Known = tuple[list[str], float | None, Sequence[int] | None]


def explained(where: str, ranks: Sequence[Known], action: str) -> str:
    """The text of the error about gradients that are not finite, from what each rank knows."""
    names = list(dict.fromkeys(name for of_rank, *_ in ranks for name in of_rank)) or [
        "a parameter of no registered model"
    ]
    lines = [f"the gradient of {_some(names, 3)} is not finite in {where}, and no rank has made this step."]
    losses = [loss for _, loss, _ in ranks]
    blamed = [rank for rank, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
    if not blamed and None not in losses:
        lines.append("The loss of every rank was finite.")
    for rank in blamed or range(len(ranks)):
        _, loss, samples = ranks[rank]
        had = "samples of unknown indices" if samples is None else f"the samples {_some(samples, 16)}"
        lines.append(f"Rank {rank} had {had}{'' if loss is None else f', and the loss {loss:g}'}.")
    return " ".join([*lines, ADVICE[action]])


def _some(values: Sequence[Any], most: int) -> str:
    """The first values as text.

    >>> _some([3, 5, 8], 2)
    '3, 5 and 1 more'
    """
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return f"{', '.join(map(str, values[:most]))}{more}"


class SkipStep(Policy):
    """Leaves out steps whose gradients are not finite. Owns the number of steps that this call has
    left out."""

    def __init__(self, registered: Registered, position: Position, device: torch.device) -> None:
        self._action = registered.options.on_nonfinite
        self.option = f"on_nonfinite={self._action!r}"
        self._registered, self._position, self._device = registered, position, device
        self.skipped = 0

    @classmethod
    def of(cls, run: Any) -> SkipStep:
        if (rule := run.settings.options.on_nonfinite) is not None and run.makes_own_steps:
            raise ConfigError(
                f"on_nonfinite={rule!r} is for operators, and {type(run.operator).__name__} makes its steps itself: leave it out"
            )
        return cls(run.registered, run.position, run.device)

    @classmethod
    def for_run(cls, run: Any) -> SkipStep | None:
        return run.skip_step if run.settings.options.on_nonfinite is not None else None

    @property
    def _control(self) -> Control:
        return self._registered.control

    def end_step(self, step: Step) -> None:
        """Count what happened in a step that is committed."""
        seen: Seen = step.notes.pop(self, None) or Seen()
        if step.outcome != "undone" and seen.left_out is not None:
            self.skipped += seen.counts
            self._position.left_out = self._position.left_out + 1 if seen.left_out else 0

    def on_backward(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        """Note the loss of a backward pass."""
        # A CUDA graph's next forward pass writes its loss to the same memory.
        step.notes.setdefault(self, Seen()).losses.append(loss.detach() if step.closing else loss.detach().clone())
        return loss

    def on_gradients(self, step: Step, optimizer: Any) -> bool:
        """Decide whether the step is made. Raise an error if it must not be, or after too many in a
        row that are left out."""
        parameters = [each for each in self._registered.stepped_by(optimizer) if each.grad is not None]
        infinite = not _are_finite(parameters)
        if not self._are_exchanged(parameters):
            infinite = summed([infinite], self._device, self._control)[0] > 0
        if infinite and (self._action == "raise" or self._position.left_out + 1 >= MOST_LEFT_OUT):
            self._raise(step, parameters)
        seen: Seen = step.notes.setdefault(self, Seen())
        seen.left_out = seen.left_out or infinite
        # A gradient scaler counts these steps itself.
        seen.counts |= infinite and self._registered.precision.key != "amp_native"
        if step.ended or not step.ends:  # user code makes it outside of a step of the loop, so nothing else counts it
            self.end_step(step)
        return not infinite

    def _are_exchanged(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every rank has the same gradients of these parameters, so that all see what is
        not finite."""
        if type(self._registered.exchange) is not Exchange or not dist.is_initialized():
            return True
        known: set[int] = set()
        for model in self._registered.wrapped:
            if isinstance(model, DistributedDataParallel) and not model.parameters_to_ignore:
                known |= {id(each) for each in model.parameters()}
        return all(id(each) in known for each in parameters)

    def _raise(self, step: Step, parameters: Sequence[torch.Tensor]) -> NoReturn:
        """Raise the error about gradients that are not finite, alike on all ranks."""
        bad = {id(each) for each in parameters if not _are_finite([each])}
        named = [pair for model in self._registered.models for pair in model.named_parameters()]
        names = [name for name, each in named if id(each) in bad]
        losses = [float(loss) for loss in step.notes.get(self, Seen()).losses]
        loss = next((each for each in losses if not math.isfinite(each)), losses[-1] if losses else None)
        drawn = [each.indices for each in step.drawn]
        samples = None if None in drawn or not drawn else [int(row) for each in drawn for row in each or ()]
        known: Known = names, loss, samples
        where = f"step {self._position.step + 1}, epoch {self._position.epoch}"
        raise NonFiniteError(explained(where, gathered_objects(known, self._control), self._action or ""))


@dataclass
class Seen:
    """What is known about the open step: the losses of its backward passes, whether one of its
    optimizers has left it out, None before that, and whether this is counted here."""

    losses: list[torch.Tensor] = field(default_factory=list)
    left_out: bool | None = None
    counts: bool = False


def _are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether these parameters' gradients are finite; of sharded ones, this rank's part."""
    gradients: list[Any] = [each.grad for each in parameters]
    gradients = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    return bool(torch.isfinite(get_total_norm([each for each in gradients if each.numel()], math.inf)))

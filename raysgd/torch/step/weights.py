"""What each part of a step weighs in its gradient: its samples, or what its loss is a mean over.
Worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from raysgd.core.outcomes import RetryStep
from raysgd.errors import ConfigError, shown
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.group import nccl
from raysgd.torch.registered import Registered
from raysgd.torch.step.precision import Autocast

COUNTING = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
IGNORED = -100  # the label that models of transformers leave out
TWICE = (
    "self.backward(loss, count=...) was called twice in a batch that shares its step with others, with accumulate or because a "
    "worker has several parts: add the losses, or leave accumulate out and pass ElasticConfig(batch='per_worker')"
)
EACH = (
    "pass count in each call of self.backward, on every rank, or in none (the default train_batch passes one if the criterion is a "
    "CrossEntropyLoss or NLLLoss)"
)


# In a step: the place of the newest batch, the unit of the gradients so far, and how much was counted.
NOTHING_COUNTED = -1, torch.ones(()), torch.zeros(())


class Counted(NamedTuple):
    """What a default method passes as a count: it need not travel as long as each sample counts the
    same."""

    value: Any
    samples: int


class GradientWeights(Policy):
    """Gives each part its weight in the step's gradient, so that the mean over the ranks, which
    they exchange, is the mean over all samples, or over all that `self.backward` got as counts.

    Samples weigh where gradients arrive at the parameters to be exchanged, whichever code runs the
    backward pass, after the hooks of user code, which need not be linear. What
    `torch.autograd.grad` returns has no weight. So do counts in bf16 and fp16: a weight depends on
    which rank computes what, and in the loss, it would decide what a backward pass in these types
    rounds, and which step overflows. In fp32, they weigh in the loss, which takes less time,
    because with counts every step has other weights.

    `ranks` returns how many workers there are. `exact` is whether they exchange means over samples,
    and `refused` is what the user has passed against that. With `travel`, counts travel in every
    step, so that no batch must be trained again.
    """

    in_usual_steps = False

    def __init__(
        self, registered: Registered, ranks: Callable[[], int], *, exact: bool, refused: str, travel: bool
    ) -> None:
        self._registered, self._workers, self._exact, self._refused = registered, ranks, exact, refused
        self._travel = travel
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # in which ranks wait for each other
        self._late = isinstance(registered.precision, Autocast)  # whether counts weigh where gradients arrive
        self._weight: float = 1.0  # of this batch
        self._arriving_weight: Any = 1.0  # of the running backward pass: a number, or a tensor, which is not read
        self._any: torch.Tensor | None = None  # whether anything counts in it, if that is not known here
        self._hooks: list[Any] = []  # each with the node that has it, which torch would forget
        self._differs = False  # whether this rank has had samples that count more or less than others
        self.joined()

    @classmethod
    def of(cls, run: Any) -> GradientWeights:
        settings, options = run.settings, run.settings.options
        against = "gradients='ranks'" if settings.averages_gradients else "parallel=None on several workers"
        refused = against if settings.adds_parts and not settings.is_exact else ""
        # Where training a batch again would repeat more than a default method does.
        travel = settings.is_sharded or options.accumulate > 1
        travel = travel or bool(run.changed("train_epoch", "train_batch", "backward"))
        ranks = lambda: run.rank_info.world_size  # noqa: E731
        return cls(run.registered, ranks, exact=settings.is_exact, refused=refused, travel=travel)

    @classmethod
    def for_run(cls, run: Any) -> GradientWeights | None:
        settings = run.settings
        return run.weigh if settings.is_exact or settings.options.accumulate > 1 else None

    def _ranks(self) -> int:
        return self._workers() if self._exact and dist.is_initialized() else 1

    def joined(self) -> None:
        """Let all ranks agree again in their next backward pass, because a generation begins."""
        self._agreed = self._counts = self._default = self._travels = False
        self._usual = 0.0
        self.reset()

    def begin_part(self, step: Step) -> None:
        self._unusual = step.current.weight != 1.0 or step.place > 0 or not step.closing
        self._set(step.current.weight if self._exact else 1.0)

    def correct(self, step: Step, factor: float) -> None:
        """Multiply the gradients of a step's batches: of those before the current one, and of its
        own where they arrive."""
        if step.place > 0:
            self._registered.multiply_gradients(factor)
        self._unusual = True
        self._set(self._weight * factor)

    def reset(self) -> None:
        self._unusual = False
        self._set(1.0)

    after_loop = reset

    def _set(self, weight: float) -> None:
        self._weight = self._arriving_weight = weight
        self._any = None
        if weight != 1.0 and not self._hooks:
            self._hook()
        while weight == 1.0 and self._hooks and not (self._late and self._counts):
            self._hooks.pop()[1].remove()
        # Whether `self.backward` needs this policy, also in usual steps.
        self.acts = self._unusual or self._counts or not self._agreed

    def _hook(self) -> None:
        shards, models = self._registered.shards, self._registered.models
        parameters = shards.full_parameters() if shards else [p for model in models for p in model.parameters()]
        for each in {id(parameter): parameter for parameter in parameters}.values():
            if each.is_floating_point() or each.is_complex():
                trained = each.requires_grad  # user code may unfreeze it before its backward pass
                each.requires_grad_(True)
                node = get_gradient_edge(each).node
                self._hooks.append((node, node.register_prehook(self._arriving)))
                each.requires_grad_(trained)

    def _arriving(self, gradients: Any) -> Any:
        weight, (gradient, *_) = self._arriving_weight, gradients
        if self._any is not None:  # 0 times NaN is NaN
            gradient = torch.where(self._any, gradient, 0)
        if isinstance(weight, torch.Tensor) or weight not in (0.0, 1.0):
            return (gradient * weight,)
        return (gradient if weight else torch.zeros_like(gradient),)

    # -- `self.backward` ------------------------------------------------------------------------------

    def loss(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradients are computed. The backward pass follows, and then
        `passed`. What this multiplies the loss by in bf16 and fp16 does not depend on the ranks."""
        count = step.count = self._counted(step, step.count)
        if count is None:
            return loss if step.share == 1.0 else loss * step.share
        default = isinstance(count, Counted)
        count = count.value if default else count
        unread = isinstance(count, torch.Tensor)
        # torch's own losses have no gradient where nothing counts, and hooks are slow where the count must not be read.
        self._any = count > 0 if unread and not default else None
        arriving: Any = 1.0 if unread or count > 0 else 0.0
        if self._ranks() > 1 or step.place > 0 or not step.closing:
            weight = self._factor(step, count)
            if not self._late:
                loss = loss * weight.to(loss.device, loss.dtype)
            elif arriving:
                arriving = weight.item() if weight.is_cpu else weight
        self._arriving_weight = arriving
        if not self._hooks and (self._any is not None or isinstance(arriving, torch.Tensor) or arriving != 1.0):
            self._hook()
        return loss

    def passed(self) -> None:
        """Note the end of the backward pass."""
        self._set(self._weight)

    def _counted(self, step: Step, count: Any) -> Any:
        """What counts in place of samples; None if nothing does."""
        if isinstance(count, Counted):
            count = None if self._refused else count
        elif count is not None:
            if self._refused:
                raise ConfigError(
                    f"self.backward(loss, count=...) cannot be combined with {self._refused}: leave one out"
                )
            count = _checked(count)
        if not self._agreed or (isinstance(count, Counted) and not self._counts):
            self._agree(count)
        by_user = count is None and self._default  # a pass of user code, beside one of a default method
        if step.place == 0 and step.closing and (by_user or self._ranks() == 1):
            return count  # nothing shares its step
        if (count is not None) != self._counts:
            how = "without a count after others with one" if count is None else "with a count after others without one"
            raise ConfigError(f"self.backward was called {how}: {EACH}")
        if not isinstance(count, Counted) or self._travels:
            if count is None or step.current.fresh:
                return count
            return count._replace(value=0) if isinstance(count, Counted) else 0
        if count.value != self._usual * count.samples:
            self._differs = True
            raise RetryStep("its loss is the first that is not a mean over equally many labels of each sample")
        return None

    def _agree(self, count: Any) -> None:
        """Agree with the other ranks on whether counts are passed, and travel."""
        is_default, ranks = isinstance(count, Counted), self._ranks()
        known = is_default and not isinstance(count.value, torch.Tensor)
        usual = float(count.value / count.samples) if known else 0.0
        always = self._travel or self._differs or not known
        travels = count is not None and (always or not usual.is_integer())
        numbers = torch.tensor([count is not None, travels, usual, usual * usual], dtype=torch.float64)
        if ranks > 1:
            numbers = self._sum(numbers.to(self._where()))
            self._registered.control.ensure_whole()
        counts, travel, sums, squares = numbers.tolist()
        if counts not in (0, ranks):
            raise ConfigError(
                f"{counts:.0f} of {ranks} ranks have passed count to self.backward, and the others have not: {EACH}"
            )
        self._agreed, self._counts, self._default, self._usual = True, counts > 0, is_default, usual
        self._travels = travel > 0 or ranks * squares != sums * sums

    def _factor(self, step: Step, count: Any) -> torch.Tensor:
        """Find what the gradient of a mean over `count` things weighs. Until its last batch, a
        rank's gradients have a unit of their own. Nothing is read from the device here."""
        here = torch.as_tensor(count, dtype=torch.float64, device=self._where(count))
        counted: tuple[int, torch.Tensor, torch.Tensor] = step.notes.get(self, NOTHING_COUNTED)
        place, unit, total = counted
        if place == step.place:
            raise ConfigError(TWICE)
        if step.place == 0 and not step.closing:
            unit = torch.where(here > 0, here, 1.0)
        total = here if step.place == 0 else total.to(here.device) + here
        if step.place > 0 or not step.closing:
            step.notes[self] = step.place, unit, total
        if not step.closing:
            return here / unit
        mean = self._sum(total / self._ranks())
        if step.place > 0:
            self._registered.multiply_gradients(torch.nan_to_num(unit.to(here.device) / mean, posinf=0.0))
        return torch.nan_to_num(here / mean)  # nothing may count in a step

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._ranks() > 1:
            with self.waiting():
                dist.all_reduce(numbers)
        return numbers

    def _where(self, count: Any = None) -> torch.device:
        """The device on which ranks add numbers."""
        if self._ranks() > 1 and dist.get_backend() != "gloo":
            return nccl.device()
        return count.device if self._ranks() == 1 and isinstance(count, torch.Tensor) else torch.device("cpu")


def _checked(count: Any) -> Any:
    """Check what a user passed as a count: a number, or a tensor on an accelerator, which is not
    read."""
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_cpu:
        return count.detach().reshape(())
    with suppress(ValueError, RuntimeError):  # an array of several elements
        count = count.item() if hasattr(count, "item") else count
    if not isinstance(count, (int, float)) or not 0 <= count < math.inf:
        raise ConfigError(
            f"count must be a number of 0 or more, how many things the loss is a mean over, got {shown(count)}"
        )
    return count


def labels_counted(labels: torch.Tensor, ignored: int, weight: torch.Tensor | None = None) -> Any:
    """Count the labels that are not the `ignored` one, or add the weights of their classes."""
    mask = labels != ignored
    if weight is not None:
        count = (weight[labels.long() * mask] * mask).sum()
    else:
        count = mask.sum(dtype=None if mask.is_cpu else torch.float64)  # in which ranks add them
    return count.item() if count.is_cpu else count


def counted_by_criterion(criterion: Any, output: Any, target: Any) -> Counted | None:
    """Find what the mean of torch's own criteria counts; None for samples. A subclass with a
    `forward` of its own may compute another mean."""
    if getattr(type(criterion), "forward", None) not in COUNTING or criterion.reduction != "mean":
        return None
    if not isinstance(target, torch.Tensor) or not target.dim():
        return None
    if target.is_floating_point():  # the probabilities of the classes
        return Counted(output.numel() // output.shape[1 if output.dim() > 1 else 0], len(target))
    return Counted(labels_counted(target, criterion.ignore_index, criterion.weight), len(target))


def counted_by_model(model: Any, labels: Any) -> Counted | None:
    """Find what the mean of a model's own loss counts, as models of transformers compute it; None
    for samples. Causal language models do not predict the first label of a sequence."""
    if not isinstance(labels, torch.Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    name = getattr(model, "loss_type", None) or type(model).__name__
    causal = "ForCausalLM" in name or (name.endswith("LMHeadModel") and not name.endswith("WithLMHeadModel"))
    return Counted(labels_counted(labels[..., 1:] if causal else labels, IGNORED), len(labels))

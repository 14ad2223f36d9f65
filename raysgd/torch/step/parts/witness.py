"""A parameter with one number for each sample, whose gradient is the sample's weight in the step:
so the weights themselves say which samples entered, how often, and with which weight. Worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.registered import Registered

PLACES = 1 << 16  # the samples of larger data sets share them


class Witness(nn.Module):
    """Owns the sums of the weights. A step of plain SGD with the rate -1 adds those of its
    samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.entered = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, rows: Any, weights: Any = None) -> torch.Tensor:
        """Compute 0, whose gradient at each of these rows is its weight, by default an equal
        one."""
        entries = self.entered[torch.as_tensor(rows).to(self.entered.device) % len(self.entered)]
        factors = torch.full_like(entries, 1 / len(entries)) if weights is None else weights
        return (entries - entries.detach()) @ factors.to(entries)


class Enter(Policy):
    """Adds the witness, the last model, to each loss that `self.backward` gets, and its gradient to
    its numbers with the next step of an optimizer."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    def on_zero_grad(self, step: Step) -> None:
        if step.place == 0:
            self._registered.optimizers[-1].zero_grad()

    begin_part = on_zero_grad

    def on_backward(self, step: Step, loss: Any) -> Any:
        if step.current.indices is None or self._registered.options.parallel is None:  # what user code exchanges
            return loss
        return loss + self._registered.wrapped[-1](torch.tensor(step.current.indices)).to(loss)

    @torch.no_grad()
    def after_step(self, step: Step, optimizer: Any) -> None:
        entered = self._registered.models[-1].entered
        if entered.grad is not None:
            self._registered.precision.unscale(self._registered.optimizers[-1])
            entered.add_(entered.grad)
            self._registered.optimizers[-1].zero_grad()


class Watched(TrainingOperator):
    """A base, before the user's operator, with a witness that the user's code does not see."""

    places: int

    def register(self, *, models: Any, optimizers: Any, **more: Any) -> Any:
        registered, witness = self._registered, Witness(self.places)
        clears = torch.optim.SGD(witness.parameters(), lr=1.0)  # and unscales; it makes no steps, which would count
        lists = [*registered.as_list(models), witness], [*registered.as_list(optimizers), clears]
        wrapped, stepped, *rest = super().register(models=lists[0], optimizers=lists[1], **more)
        return registered.like(models, wrapped[:-1]), registered.like(optimizers, stepped[:-1]), *rest

    def unwrapped(self, model: Any = None) -> Any:
        models = self._registered.models
        return super().unwrapped(models[0] if model is None and len(models) == 2 else model)

    def _only_optimizer(self, optimizer: Any = None) -> Any:
        optimizers = self._registered.optimizers[:-1]
        return optimizers[0] if optimizer is None and len(optimizers) == 1 else super()._only_optimizer(optimizer)

    def _make_policies(self) -> list[Policy]:
        return [*super()._make_policies(), Enter(self._registered)]


def watched(operator: type[TrainingOperator], places: int = PLACES) -> type[TrainingOperator]:
    """This operator's class with a witness of so many samples."""
    return type(operator.__name__, (Watched, operator), {"places": places})

"""Average gradients with Horovod's DistributedOptimizer, beside registered optimizers. Worker."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.errors import ConfigError
from raysgd.horovod.arguments import HorovodArguments
from raysgd.horovod.foreign import has_unsent_gradients, stop_sending
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.step.closures import after_gradients

AT_THE_STEP = 1 << 30


class Sender:
    """Owns one DistributedOptimizer, which sends the gradients of an optimizer's parameters while
    the backward pass is still running. It never makes a step: the registered optimizer keeps its
    state, schedulers and hooks.

    When a backward pass returns, the gradients are averaged over all ranks, as with DDP. So a loop
    can use them in any way. With `passes`, this is so only after that many backward passes.
    """

    def __init__(self, hvd: Any, names: list[tuple[str, Any]], arguments: dict[str, Any], *, passes: int) -> None:
        self._passes, self._done, self._in_pass = passes, 0, False
        self._holds = False
        self.names = [name for name, _ in names]
        self._distributed = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter for _, parameter in names], lr=0.0),
            named_parameters=names,
            backward_passes_per_step=passes,
            **arguments,
        )
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for _, parameter in names]

    def hold(self, on: bool) -> None:
        self._holds = on
        self._distributed.set_backward_passes_per_step(AT_THE_STEP if on else self._passes)

    def finish(self) -> None:
        self._done, self._in_pass = 0, False
        if has_unsent_gradients(self._distributed):
            self._distributed.synchronize()

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        stop_sending(self._distributed)

    def _arrived(self, parameter: Any) -> None:
        """At the first gradient of a backward pass, ask to be called at the end of the pass."""
        if not self._in_pass:
            self._in_pass = True
            run_after_backward(self._pass_ended)

    def _pass_ended(self) -> None:
        self._in_pass = False
        self._done += 1
        if not self._holds and self._done % self._passes == 0:
            self.finish()


class HorovodExchange(Exchange):
    """Owns a new sender for each optimizer in each generation. Gives all ranks rank 0's state."""

    def __init__(self, arguments: HorovodArguments) -> None:
        self._arguments = arguments
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._senders: dict[int, Sender] = {}

    def prepare(self, models: list[Any], optimizers: list[Any]) -> None:
        self._models, self._optimizers = models, optimizers
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"backend='horovod' averages the gradients of torch optimizers, got {optimizer!r}: register one, or "
                    "pass parallel=None and exchange gradients yourself"
                )
            optimizer.register_step_pre_hook(self._before_step)

    def equalize(self) -> None:
        import horovod.torch as hvd

        for model in self._models:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for optimizer in self._optimizers:
            _broadcast_state(hvd, optimizer)

    def joined(self) -> None:
        for sender in self._senders.values():
            sender.end()
        self._senders.clear()
        self.begin_call()

    def begin_call(self) -> None:
        """Send the gradients of all parameters that are trained now. Some of them may have been
        frozen in the last call."""
        import horovod.torch as hvd

        for number, optimizer in enumerate(self._optimizers if hvd.size() > 1 else ()):
            names, sender = _named(number, optimizer), self._senders.pop(id(optimizer), None)
            if sender is not None and sender.names != [name for name, _ in names]:
                sender.end()
                sender = None
            if names:
                self._senders[id(optimizer)] = sender or self._sender(hvd, names)

    def hold(self, on: bool) -> None:
        for sender in self._senders.values():
            sender.hold(on)

    def finish(self, optimizer: Any) -> None:
        if id(optimizer) in self._senders:
            self._senders[id(optimizer)].finish()

    def _sender(self, hvd: Any, names: list[tuple[str, Any]]) -> Sender:
        sums = self._arguments.op == "sum"  # a mean of means is the mean, but a sum of sums is not the sum
        passes = AT_THE_STEP if sums else self._arguments.backward_passes_per_step
        return Sender(hvd, names, self._arguments.resolved(hvd), passes=passes)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Finish the exchange before any step of an optimizer, whichever code makes it. A closure
        computes its gradients within the step, so finish the exchange after the closure."""
        self.finish(optimizer)
        return after_gradients(args, kwargs, lambda: self.finish(optimizer))


def _named(number: int, optimizer: Any) -> list[tuple[str, Any]]:
    """Find the trainable parameters with names that are the same on every rank."""
    return [
        (f"optimizer{number}.{group}.{place}", parameter)
        for group, content in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(content["params"])
        if parameter.requires_grad
    ]


def _broadcast_state(hvd: Any, optimizer: Any) -> None:
    """Give rank 0's state to every rank. Horovod's own function makes a step with an optimizer that
    has no state yet, to create one. That is not necessary: either all ranks have a state, or none
    has."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0, name="raysgd.optimizer"))
    elif optimizer.state:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

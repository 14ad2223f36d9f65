"""Weights that user code moves before its step, as SAM and momentum encoders do: a step that is
made again begins with those of the last one. Worker."""

from __future__ import annotations

import copy
from typing import Any

import torch

from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.foreign import copy_all
from raysgd.torch.registered import Registered
from raysgd.torch.step.closures import after_gradients, closure_in


class RestoreWeights(Policy):
    """Restores the weights of a step that is undone, for operators that move weights before an
    optimizer acts. Of an optimizer that calls a closure several times, its state too.

    Which weights move is seen in the first two steps, in which all are copied: whenever a model is
    called, a backward pass begins or a closure ends, and when the first optimizer acts. (In the
    first one, an encoder that begins as a copy of the model is still equal to it.) If none moves,
    later steps cost nothing.

    The first two steps in which a rank has several parts also show which weights a part moves after
    its step, which only the last part makes: averages, and weights that decay by hand.
    """

    for_each_part = True

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._looks = self._looks_at_parts = 2  # steps in which it is still to be seen
        self._now: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []  # their contents at the beginning of the step
        self._moved: set[int] = set()  # places in these lists
        self._acted = False  # whether an optimizer has acted in such a step
        self._hooks: list[Any] = []  # of optimizers
        self._of_models: list[Any] = []  # only within a loop, because copies of a model would have them
        self._states: list[tuple[Any, dict[str, Any]]] = []  # of optimizers, before a step with a closure

    @classmethod
    def for_run(cls, run: Any) -> RestoreWeights | None:
        settings, moves = run.settings, run.changed("train_epoch", "train_batch")
        needed = moves and settings.adds_parts and settings.options.parallel != "fsdp"
        return cls(run.registered) if needed else None

    def kept(self, step: Step) -> list[torch.Tensor]:
        if step.place > 0:
            return [each.clone() for each in self._now]
        self._states = []  # user code may have made steps between two loops
        if not step.current.last_part and self._looks_at_parts > 0:
            self._looks_at_parts -= 1
            self._looks = max(self._looks, 1)
        if self._looks == 0:
            copy_all(self._now, self._before)
            return self._before
        self._now = [each for model in self._registered.models for each in model.parameters()]
        self._before = [each.clone() for each in self._now]
        self._acted = False
        if not self._hooks:
            hooked = [each for each in self._registered.optimizers if hasattr(each, "register_step_pre_hook")]
            self._hooks = [each.register_step_pre_hook(self._acts) for each in hooked]
        if not self._of_models:
            self._of_models = [each.register_forward_pre_hook(self._look) for each in self._registered.wrapped]
        return self._before

    def put_back(self, step: Step, value: list[torch.Tensor]) -> None:
        if step.outcome != "undone":  # the weights of a batch of several parts move once
            self._look()
        copy_all(value, self._now)
        for optimizer, state in self._states if step.outcome == "undone" else ():
            optimizer.load_state_dict(state)

    def on_backward(self, step: Step, loss: Any) -> Any:
        self._look()
        return loss

    def end_step(self, step: Step) -> None:
        states, self._states = self._states, []
        if self._looks > 0 and step.outcome not in ("skipped", "undone"):
            self._look()
            self._looks -= 1
            if self._looks == 0:
                self.in_usual_steps = bool(self._moved)
                self._now, self._before = ([each[place] for place in self._moved] for each in (self._now, self._before))
                self.reset()
                if not (states and self._moved):
                    for hook in self._hooks:
                        hook.remove()
                    self._hooks = []

    def reset(self) -> None:
        for hook in self._of_models:
            hook.remove()
        self._of_models = []

    def _acts(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before an optimizer's step."""
        # torch's optimizers but one call a closure once, before they change a weight.
        iterates = isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")
        if iterates and closure_in(args, kwargs) is not None:
            self._states.append((optimizer, copy.deepcopy(optimizer.state_dict())))
        if self._acted or self._looks == 0:
            return None
        arguments = after_gradients(args, kwargs, self._look_again)
        self._acted = True
        return arguments

    def _look(self, *_: Any) -> None:
        if not self._acted:
            self._look_again()

    def _look_again(self) -> None:
        if self._looks > 0:
            pairs = enumerate(zip(self._now, self._before, strict=True))
            self._moved |= {place for place, pair in pairs if place not in self._moved and not torch.equal(*pair)}

"""Define the policies of optimizer steps: what an option does to a step. Worker."""

from __future__ import annotations

from typing import Any

from raysgd.training.feed import Feed
from raysgd.training.step import Step


class Policy:
    """Takes part in steps, or observes them. An operator has several, which act in their order; by
    default they do nothing. Torch's operators call all of these methods, TensorFlow's, whose steps
    are graph functions, the first five.

    option          what the user has passed, if it acts in the operator's helpers only, so that
                    torch's own methods must not be used
    in_usual_steps  False if it does nothing in usual steps: of one batch, of which all ranks have
                    the same number of samples
    """

    option = ""
    in_usual_steps = True

    def acts_in(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Policy, method)

    def on_epoch(self, feed: Feed) -> None:
        """Called before a loop over an epoch, or over the rest of it. `feed` has what the loop
        reads, and the running step."""

    def begin(self, step: Step) -> None:
        """Called before each part of a batch, which is `step.current` now."""

    def before_commit(self, step: Step) -> None:
        """Called before a step is committed, unless an error has ended it, and by raysgd's loops
        also when its last batch is done. Raise an error if it must not be committed."""

    def on_step(self, step: Step) -> None:
        """Called when a step has ended. It is "undone", or "applied" or "skipped" and committed."""

    def rest(self) -> None:
        """Called after a loop, which an error may have ended: no step is open."""

    def alone(self) -> None:
        """Called when a loop has no further batch: steps that follow are those of user code."""

    def cleared(self, step: Step) -> None:
        """Called by `self.zero_grad`, which clears nothing after the first batch of a step."""

    def weighted(self, step: Step, loss: Any) -> Any:
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

    def unchecked(self, step: Step, optimizer: Any) -> None:
        """Called before a step that other code than `self.step` makes, when its gradients are
        there, so that `check` was not called."""

    def direct(self, step: Step, optimizer: Any) -> None:
        """Called before a step that user code makes with `optimizer.step()`, after `unchecked`."""

    def stepped(self, step: Step, optimizer: Any) -> None:
        """Called after each step of an optimizer, and after the user's hooks on it."""

    def trained(self, step: Step) -> None:
        """Called by the default loop when `train_batch` has returned, unless a user's loop gives it
        the batches."""

"""Define the policies of optimizer steps: what an option does to a step. Worker."""

from __future__ import annotations

from typing import Any

from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.step import Step


class Policy:
    """Takes part in steps, or observes them. An operator has several, which act in their order; by
    default they do nothing. Torch's operators call all of these methods, TensorFlow's, whose steps
    are graph functions, the first seven.

    option          what the user has passed, if it acts in the operator's helpers only, so that
                    torch's own methods must not be used
    in_usual_steps  False if it does nothing in usual steps: of one batch, of which all ranks have
                    the same number of samples
    for_each_part   whether each part of a batch begins with what `kept` has returned before the
                    first one
    """

    option = ""
    in_usual_steps = True
    for_each_part = False

    @classmethod
    def for_run(cls, run: Any) -> Policy | None:
        """Return what takes part in the steps of the operator with these internals, None if its run
        does not need that. Called after `setup`."""
        raise NotImplementedError

    def acts_in(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Policy, method)

    def begin_loop(self, feed: Feed) -> None:
        """Called before a loop over an epoch, or over the rest of it. `feed` has what the loop
        reads, and the running step."""

    def kept(self, step: Step) -> Any:
        """Return what `put_back` gets if this step is undone. Called before its first part, and,
        with `for_each_part`, before the first part of each further batch."""

    def put_back(self, step: Step, value: Any) -> None:
        """Restore what `kept` has returned: the step is "undone", or another part of the batch
        begins."""

    def begin_part(self, step: Step) -> None:
        """Called before each part of a batch, which is `step.current` now."""

    def before_commit(self, step: Step) -> None:
        """Called before a step is committed, unless an error has ended it, and by raysgd's loops
        also when its last batch is done. Raise an error if it must not be committed."""

    def end_step(self, step: Step) -> None:
        """Called when a step has ended. It is "undone", or "applied" or "skipped" and committed."""

    def reset(self) -> None:
        """Called after a loop, which an error may have ended: no step is open."""

    def after_loop(self) -> None:
        """Called when a loop has no further batch: steps that follow are those of user code."""

    def on_zero_grad(self, step: Step) -> None:
        """Called by `self.zero_grad`, which clears nothing after the first batch of a step."""

    def on_backward(self, step: Step, loss: Any) -> Any:
        """Called by `self.backward`. Return the loss whose gradients are computed."""
        return loss

    def on_partial_step(self, step: Step, optimizer: Any) -> None:
        """Called by `self.step` if the step needs further batches."""

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        """Called by `self.step` otherwise, with the gradients as the backward pass has left
        them."""

    def on_gradients(self, step: Step, optimizer: Any) -> bool:
        """Called by `self.step` with the gradients of all ranks, not scaled. Return whether to make
        the step: alike on all ranks."""
        return True

    def on_other_step(self, step: Step, optimizer: Any) -> None:
        """Called before a step that other code than `self.step` makes, when its gradients are
        there."""

    def on_direct_step(self, step: Step, optimizer: Any) -> None:
        """Called after that, if user code makes the step with `optimizer.step()`."""

    def after_step(self, step: Step, optimizer: Any) -> None:
        """Called after each step of an optimizer, and after the user's hooks on it."""

    def after_batch(self, step: Step) -> None:
        """Called by the default loop when `train_batch` has returned, unless a user's loop gives it
        the batches."""

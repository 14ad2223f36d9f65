"""One loop over data: yield its batches to the operator, and commit each step. Worker.

Nothing else counts what was trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

from raysgd.replica.steps.feed import Feed, MembershipChange
from raysgd.replica.steps.step import NO_POLICIES, Step

USED_UP = (
    "train_epoch or validate iterates a second time over the batches that it got. It gets each batch once, so there are none. For "
    "several epochs, call train() as often, or fit(n)"
)


class Batches:
    """What an operator's loop iterates over, once."""

    def __init__(self, batches: Any, warn: Callable[[str], None]) -> None:
        self._batches, self._warn = batches, warn
        self._in_chunks = False  # by `islice`, which asks once more at the end
        self.close = batches.close

    def __iter__(self) -> Iterator[Any]:
        state = inspect.getgeneratorstate(self._batches)
        self._in_chunks = self._in_chunks or state == inspect.GEN_SUSPENDED
        if state == inspect.GEN_CLOSED and not self._in_chunks:
            self._warn(USED_UP)
        batches: Iterator[Any] = self._batches
        return batches

    def __next__(self) -> Any:
        return next(self._batches)


class StepLoop:
    """Owns one loop of an operator over the steps of a `feed`, for the replica that is its `owner`.

    batches  what the operator's loop iterates over
    unwinds  whether a stop at a batch boundary ends the user's loop, and not the iteration
    """

    def __init__(self, feed: Feed, owner: Any, *, unwinds: bool = False) -> None:
        self.feed, self._owner, self._control, self._unwinds = feed, owner, owner.control, unwinds
        self.batches = feed.batches = Batches(self._make_batches(), owner.internals.warn_once)

    def _make_batches(self) -> Generator[Any]:
        """Yield each batch, or each part of one, and end its step when the loop asks for what
        follows it."""
        feed = self.feed
        try:
            for step in feed:
                policies = step.policies if feed.training else NO_POLICIES
                if policies.restoring:
                    step.keep()
                for begin_part in policies.begin_part:
                    begin_part(step)
                yield step.current.batch  # to `train_batch`: zero_grad, backward and step act on this step
                if step.closing:
                    self._end_step(step)
        except MembershipChange:
            if self._unwinds:
                raise
            return
        feed.finish()
        if self._control.due(last=True):
            self._owner.report(feed)

    def _end_step(self, step: Step, *, failed: bool = False) -> None:
        """Commit a step unless it is undone; only one that was applied can have `failed`. Then tell
        its policies, and send the driver what is due."""
        feed, owner, control = self.feed, self._owner, self._control
        policies = step.policies if feed.training else NO_POLICIES
        counts, begun_at, step.failed = step.outcome != "undone", feed.position.step, failed
        if counts and not failed:
            if step.error is not None:
                raise step.error
            for check in policies.before_commit:
                check(step)
        if counts:
            feed.position.commit(step)
            control.batch = feed.position.call_batches
        for end_step in policies.end_step:
            end_step(step)
        if counts and control.due(last=failed):
            owner.report(feed)
        if counts and not failed and feed.training and owner.snapshots.within_epochs:
            owner.snapshots.take_if_due(owner, feed, begun_at)

    def end(self, *, failed: bool = False) -> None:
        """End the loop, also after an error. The step that it leaves open is committed if it
        counts, and undone otherwise."""
        feed, internals = self.feed, self._owner.internals
        step, failure = feed.step, feed.failure
        if not step.ended:
            if failed and feed.training and internals.step_was_made():
                step.outcome = "applied"
            if not step.counts(failed=failed):
                step.undo()
            self._end_step(step, failed=failed)
        feed.failure = step.error = None  # a traceback would keep the process group that ends
        internals.end_loop()
        if failure is not None and not failed:
            raise failure  # the user's loop caught it, but the data has not ended

"""One loop over data: yield its batches to the operator, and commit each step. Worker.

Nothing else counts what was trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from raysgd.core.control import Control
from raysgd.replica.feed import Feed, MembershipChange
from raysgd.replica.internals import Internals
from raysgd.replica.snapshots import Snapshotter
from raysgd.replica.step import Step

USED_UP = (
    "train_epoch or validate iterates a second time over the batches that it got. It gets each batch once, so there are none. For "
    "several epochs, call train() as often, or fit(n)"
)


class LoopOwner(Protocol):
    """What a loop needs of its replica."""

    control: Control
    internals: Internals

    snapshots: Snapshotter

    def report(self, feed: Feed) -> None:
        """Send the progress to the driver."""


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
        found: Iterator[Any] = self._batches
        return found

    def __next__(self) -> Any:
        return next(self._batches)


class StepLoop:
    """Owns one loop of an operator over the steps of a `feed`.

    batches  what the operator's loop iterates over
    unwinds  whether a stop at a batch boundary ends the user's loop, and not the iteration
    """

    def __init__(self, feed: Feed, owner: LoopOwner, *, unwinds: bool = False) -> None:
        self.feed, self._owner, self._control, self._unwinds = feed, owner, owner.control, unwinds
        self.batches = feed.batches = Batches(self._make_batches(), owner.internals.warn_once)

    def _make_batches(self) -> Generator[Any]:
        """Yield the batches, and commit each step when the loop asks for what follows it."""
        feed = self.feed
        try:
            for step in feed:
                if feed.training and step.policies.restored:
                    step.keep()
                for begin_part in step.policies.begin_part if feed.training else ():
                    begin_part(step)
                # To `train_batch`, in which self.zero_grad, self.backward and self.step act on the step.
                yield step.current.batch
                if step.closing:
                    self._end_step(step)
        except MembershipChange:
            if self._unwinds:
                raise
            return
        feed.finish()
        if self._control.due(last=True):
            self._owner.report(feed)

    def end(self, *, failed: bool = False) -> None:
        """End the loop, also after an error. The step that it leaves open is committed if it
        counts, and undone otherwise."""
        feed = self.feed
        step, failure = feed.step, feed.failure
        if not step.ended:
            if failed and feed.training and self._owner.internals.was_made():
                step.outcome = "applied"
            if not step.counts(failed=failed):
                step.undo()
            self._end_step(step, failed=failed)
        feed.failure = step.error = (
            None  # a traceback would keep the process group that ends, and be kept by its own frames
        )
        self._owner.internals.end_loop()
        if failure is not None and not failed:
            raise failure  # the user's loop caught it, but the data has not ended

    def _end_step(self, step: Step, *, failed: bool = False) -> None:
        """Commit a step, unless it is undone, or has `failed` before it was applied."""
        feed, position, counts = self.feed, self.feed.position, step.outcome != "undone"
        before, step.failed = position.step, failed
        if step.error is not None and counts and not failed:
            raise step.error
        for policy in step.policies.before_commit if counts and feed.training and not failed else ():
            policy(step)
        if counts:
            position.commit(step)
            self._control.batch = position.call_batches
        for end_step in step.policies.end_step if feed.training else ():
            end_step(step)
        if not counts:
            return
        owner = self._owner
        if self._control.due(last=failed):
            owner.report(feed)
        if owner.snapshots.within_epochs and feed.training and not failed:
            owner.snapshots.take_if_due(owner, feed, before)

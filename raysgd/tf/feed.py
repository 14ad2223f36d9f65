"""The iterator that a train or validation loop runs over: it deals batches, and counts what is committed.

A batch is committed when the loop comes back for the next one, or, if the loop is cut short, when an optimizer has
stepped in it. So it works the same for the default loop and for one of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.tf.data import Drawn, Source
from raysgd.tf.position import Position

__all__ = ["Feed", "MembershipChange"]


class MembershipChange(BaseException):
    """Raised inside a user's own `train_epoch` to end it at a batch border; it is called again for the rest.

    Not an Exception, so that a loop that handles errors of its batches lets it pass.
    """


class Feed:
    """Owns the batch that is being worked on. `epoch_ended` and `fresh` tell the default loop what it needs."""

    def __init__(
        self,
        source: Source,
        position: Position,
        rank_info: RankInfo,
        control: Control,
        *,
        limit: int | None,
        on_begin: Callable[[Drawn], None],
        on_commit: Callable[[], None],
        stepped: Callable[[], bool],
        unwind: bool = False,
    ) -> None:
        self._source, self._position, self._rank_info, self._control = source, position, rank_info, control
        self._limit, self._unwind = limit, unwind
        self._on_begin, self._on_commit, self._stepped = on_begin, on_commit, stepped
        self._drawn: Iterator[Drawn] | None = None
        self._pending: Drawn | None = None
        self._empty_epochs = 0
        self.fresh = True
        self.epoch_ended = False
        self.stopped = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._commit()
        control, position = self._control, self._position
        if self.stopped or position.call_done:
            raise StopIteration
        if self._limit is not None and position.call_batches >= self._limit:
            self._note_end_of_epoch()
            self._finish()
            raise StopIteration
        if not control.begin(position.step + 1):
            self._stop()
        control.phase = "loading data"
        drawn = self._draw()
        if drawn is None:
            raise StopIteration
        control.phase = "in a batch"
        self._pending, self.fresh = drawn, drawn.fresh
        self._on_begin(drawn)
        return drawn.batch

    def cut_short(self) -> bool:
        """The loop was left by an error. What was applied is committed; True: what was not must be done again."""
        if self._pending is None:
            return False
        if self._stepped():
            self._commit()
            return False
        self._pending = None
        return True

    def leave(self) -> None:
        """The loop ended by itself. One that left before the feed's end has done the batch it was in."""
        self._commit()

    def _draw(self) -> Drawn | None:
        """The next batch; over the border of an epoch only when a number of steps is asked for."""
        position = self._position
        while True:
            if position.ended:
                if self._limit is None and position.epoch >= position.call_epoch:
                    self._finish()  # this call's epoch was ended before a peer was lost
                    return None
                position.epoch += 1
                position.offset, position.ended = 0, False
            if self._drawn is None:
                self._drawn = self._source.batches(self._rank_info, position.epoch, position.offset)
                self._expect()
            drawn = next(self._drawn, None)
            if drawn is not None:
                self._empty_epochs = 0
                return drawn
            position.ended = self.epoch_ended = True
            self._drawn = None
            if self._limit is None and position.call_batches == 0 and position.offset > 0:
                position.call_epoch += 1  # earlier calls had done that epoch to its last batch: this call's is the next
                continue
            self._empty_epochs += 1
            if self._limit is None or self._empty_epochs > 1:
                self._finish()
                return None

    def _expect(self) -> None:
        """How long this call will be, for whoever shows its progress."""
        left = self._source.steps_left(self._position.offset)
        if self._limit is not None:
            self._position.call_expected = self._limit
        elif left is not None:
            self._position.call_expected = self._position.call_batches + left

    def _note_end_of_epoch(self) -> None:
        """A number of steps that comes out at the end of an epoch ends it, where the data's length is known."""
        position = self._position
        if not position.ended and self._source.steps_left(position.offset) == 0:
            position.ended = self.epoch_ended = True

    def _commit(self) -> None:
        drawn = self._pending
        if drawn is None:
            return
        self._pending = None
        position = self._position
        position.offset = drawn.offset
        position.step += 1
        position.call_batches += 1
        position.call_units += drawn.rows
        self._control.batch = position.call_batches
        self._on_commit()

    def _finish(self) -> None:
        self._position.call_done = True

    def _stop(self) -> None:
        self.stopped = True
        if self._unwind:
            raise MembershipChange
        raise StopIteration

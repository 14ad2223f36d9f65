"""The iterator of a training or validation loop: returns batches, and counts what is committed. Worker.

A batch is committed when the loop comes back for the next one, or, if the loop is cut short, when an optimizer has
stepped in it. So it works the same for the default loop and for one of the user's own. Batches that share one step
(a window) are committed together, with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from raysgd.core.outcomes import DataLoaderFailure
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.data.prefetch import Ahead, Carrier
from raysgd.torch.data.sources import Drawn, PlannedSource, Source
from raysgd.training.position import Position

__all__ = ["Feed", "MembershipChange"]


class MembershipChange(BaseException):
    """Raised inside a user's `train_epoch` to end it at a batch boundary; it is called again for the rest of the epoch.

    This is not an Exception, so that user code that catches the errors of its batches does not catch it.
    """


class Feed:
    """Owns the batch that is being processed. The default loop reads `epoch_ended` and `fresh`."""

    def __init__(
        self,
        source: Source,
        position: Position,
        rank_info: RankInfo,
        control: Control,
        *,
        limit: int | None,
        shared: bool,
        carrier: Carrier,
        on_commit: Callable[..., None],
        window: int = 1,
        on_batch: Callable[[Any, int, bool], None] | None = None,
        unwind: bool = False,
        name: str = "train_loader",
    ) -> None:
        self._source, self._position, self._rank_info, self._control = source, position, rank_info, control
        self._limit, self._shared, self._unwind, self._name = limit, shared, unwind, name
        self._carrier, self._on_commit = carrier, on_commit
        self._window_size, self._on_batch = window, on_batch
        self._drawn: Ahead | Iterator[Drawn] | None = None
        self._pending: Drawn | None = None
        self._window: list[Drawn] = []
        self._closing = True
        self._stepped = False
        self._empty_epochs = 0
        self._failure: DataLoaderFailure | None = None
        self._counts_samples = source.counts_samples
        self.fresh = True
        self.epoch_ended = False
        self.stopped = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure  # the loop caught it, but there is no next batch without a new loader
        self._done()
        control, position = self._control, self._position
        if self.stopped or position.call_done:
            raise StopIteration
        if self._limit is not None and position.call_batches >= self._limit:
            self._note_end_of_epoch()
            self._finish()
            raise StopIteration
        if control.interrupted if self._window else not control.begin(position.step + 1):
            self._window.clear()
            self._stop()
        control.phase = "loading data"
        try:
            drawn = self._draw()
        except DataLoaderFailure as failure:
            self._failure = failure
            raise
        if drawn is None:
            raise StopIteration
        control.phase = "a batch"
        self._pending, self._stepped, self.fresh = drawn, False, drawn.fresh
        if isinstance(self._drawn, Ahead):
            batch = drawn.batch
            self._closing = self._drawn.last or len(self._window) + 1 == self._window_size
        else:
            batch = self._carrier.arrived(self._carrier.send(drawn.batch))
        if self._on_batch is not None:
            self._on_batch(batch, len(self._window), self._closing)
        return batch

    @property
    def epoch(self) -> int:
        """The epoch of the batch in work, counted from 1."""
        return self._position.epoch

    @property
    def between_epochs(self) -> bool:
        """Has the last batch of an epoch been dealt, and the next epoch not begun?"""
        return self._position.ended

    def end_epoch(self) -> None:
        """The loop leaves the batch in work and the rest of this epoch undone. On all ranks at the same batch."""
        self._pending = self._drawn = None
        self._window.clear()
        self._position.ended = self.epoch_ended = True

    def stepped(self, *_: Any) -> None:
        """An optimizer has applied its step: the batch in work counts, whatever comes after."""
        self._stepped = True

    def cut_short(self) -> None:
        """The loop was left by an error. What was applied is committed, what was not will be done again."""
        if self._pending is not None and self._stepped:
            self._done(last=True)
        self._pending = None
        self._window.clear()

    def leave(self) -> None:
        """The loop ended by itself. One that left before the feed's end has done the batch it was in; batches that
        still wait for their common step will be dealt again."""
        if self._failure is not None:
            raise self._failure
        self._done()
        self._window.clear()

    def _draw(self) -> Drawn | None:
        """The next batch; over the border of an epoch only when a number of steps is asked for."""
        position = self._position
        while True:
            if position.ended:
                if self._limit is None and position.epoch >= position.call_epoch:
                    self._finish()  # this call's epoch was ended before a peer was lost
                    return None
                self._begin_epoch()
            if self._drawn is None:
                self._drawn = self._ahead(self._source.batches(self._rank_info, position.offset))
                self._expect()
            drawn = next(self._drawn, None)
            if drawn is not None:
                self._empty_epochs = 0
                return drawn
            position.ended = self.epoch_ended = True
            self._drawn = None
            if position.offset == 0:
                self._refuse_empty()
            if self._limit is None and position.call_batches == 0 and position.offset > 0:
                position.call_epoch += 1  # earlier calls had done that epoch to its last batch: this call's is the next
                continue
            self._empty_epochs += 1
            if self._limit is None or self._empty_epochs > 1:
                self._finish()
                return None

    def _refuse_empty(self) -> None:
        """An epoch without a batch is a mistake of its data; only a rank's own share of a validation may be empty."""
        source = self._source
        whole = len(source.order) if isinstance(source, PlannedSource) else 1
        if self._name == "validation_loader" and self._shared and whole > 0:
            return
        raise ConfigError(
            f"{self._name} gave no batch at all: its data set is empty, or drop_last=True leaves less than one step for "
            f"{self._rank_info.world_size} worker(s), or it is a generator that an earlier epoch used up. "
            f"Register data with at least one batch: self.register_data({self._name}=...)"
        )

    def _ahead(self, drawn: Iterator[Drawn]) -> Ahead | Iterator[Drawn]:
        """One batch is drawn in advance where that pays, or where a window must know whether it is its last."""
        if not self._carrier.ahead and self._window_size == 1:
            return drawn
        most = None if self._limit is None else self._limit - self._position.call_batches
        return Ahead(drawn, self._carrier, most)

    def _note_end_of_epoch(self) -> None:
        """A number of steps that comes out at the end of an epoch ends it, where the plan can tell."""
        position, source = self._position, self._source
        if isinstance(source, PlannedSource) and source.steps_left(self._rank_info, position.offset) == 0:
            position.ended = self.epoch_ended = True

    def _expect(self) -> None:
        """How long this call will be, for whoever shows its progress."""
        if self._limit is not None:
            self._position.call_expected = self._limit
        elif isinstance(self._source, PlannedSource):
            left = self._source.steps_left(self._rank_info, self._position.offset)
            self._position.call_expected = self._position.call_batches + left

    def _begin_epoch(self) -> None:
        self._source.begin(self._position.epoch, self._rank_info, self._shared)
        self._position.epoch += 1
        self._position.offset, self._position.ended = 0, False

    def _done(self, last: bool = False) -> None:
        """The loop is through with the batch in work. The last one of a window commits them all."""
        if self._pending is None:
            return
        position = self._position
        if self._window_size == 1:
            offset, self._pending = self._pending.offset, None
            if self._counts_samples:
                position.call_units += offset - position.offset
            position.offset = offset
            position.step += 1
            position.call_batches += 1
            self._control.batch = position.call_batches
            self._on_commit(last=last)
            return
        self._window.append(self._pending)
        self._pending = None
        if not self._closing:
            return
        for drawn in self._window:
            if self._counts_samples:
                position.call_units += drawn.offset - position.offset
            position.offset = drawn.offset
        position.step += len(self._window)
        position.call_batches += len(self._window)
        self._window.clear()
        self._control.batch = position.call_batches
        self._on_commit(last=last)

    def _finish(self) -> None:
        self._position.call_done = True
        self._on_commit(last=True)

    def _stop(self) -> None:
        self.stopped = True
        if self._unwind:
            raise MembershipChange
        raise StopIteration

"""The iterator over which a training or validation loop runs: it returns batches, and counts what is committed. Worker.

A batch is committed when the loop asks for the next one, or, if an error ends the loop, when an optimizer has stepped
in it. This works for the default loop and for a user's own. Batches that share one optimizer step (an accumulation
window) are committed together, with the last of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from raysgd.core.outcomes import DataLoaderFailure
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, counted
from raysgd.training.position import Position


class MembershipChange(BaseException):
    """Raised inside a user's `train_epoch` to end it at a batch boundary; it is called again for the rest of the epoch.

    This is not an Exception, so that user code that catches the errors of its batches does not catch it.
    """


class Drawn(NamedTuple):
    """One rank's batch.

    offset  the position in the epoch once the batch is committed
    fresh   False if its samples are repeated, by a rank that has none left but must take part in the step
    rows    the samples of all ranks' batches together, if the source counts them
    weight  this rank's part of these samples, relative to an equal share (`RankPart`)
    whole   False if this is one of several pieces of the rank's batch, and not the last one
    units   this rank's samples, as (start, stop) of the epoch's order; None if the source has no order
    """

    batch: Any
    offset: int
    fresh: bool = True
    rows: int | None = None
    weight: float = 1.0
    whole: bool = True
    units: tuple[int, int] | None = None


class Source(Protocol):
    """Draws one rank's batches. It does not know what is committed: the caller passes the offset. `loader` is the data
    for which it was opened."""

    loader: Any

    @property
    def counts_samples(self) -> bool:
        """Return whether offsets count the samples of all ranks."""

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Prepare a new epoch; `epoch` epochs were begun before it."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Return this rank's part of the rest of the epoch."""

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        """Return how many steps of the epoch are left after `offset`, or None if that is not known."""


class Carrier:
    """Transfers batches to the model's device. This one leaves them where they are.

    `send` starts a transfer, and `arrived` returns the batch when it is needed. `ahead` is whether one batch should be
    sent in advance.
    """

    ahead = False

    def send(self, batch: Any) -> Any:
        return batch

    def arrived(self, sent: Any) -> Any:
        return sent


class LookAhead:
    """Iterates over drawn batches, one in advance: the next batch is being transferred, and `last` is known.

    It never draws more than `most` batches, because an unused batch would have to be drawn again.
    """

    def __init__(self, drawn: Iterator[Drawn], carrier: Carrier, most: int | None) -> None:
        self._drawn, self._carrier, self._left = drawn, carrier, most
        self._next: Drawn | None = None
        self._begun = False

    @property
    def last(self) -> bool:
        """Return whether the batch that was returned last is the last one."""
        return self._next is None

    def __iter__(self) -> Iterator[Drawn]:
        return self

    def __next__(self) -> Drawn:
        current = self._next if self._begun else self._draw()
        self._begun = True
        if current is None:
            raise StopIteration
        self._next = None  # if drawing fails, no batch is returned twice
        self._next = self._draw()
        return current._replace(batch=self._carrier.arrived(current.batch))

    def _draw(self) -> Drawn | None:
        if self._left is not None and self._left <= 0:
            return None
        drawn = next(self._drawn, None)
        if drawn is None:
            return None
        if self._left is not None:
            self._left -= drawn.whole
        return drawn._replace(batch=self._carrier.send(drawn.batch))


class Feed:
    """Owns the batches that are not committed yet. The default loop reads `epoch_ended`, `fresh` and `whole`.

    limit      how many batches the call may have; None for the rest of the epoch
    pause_at   stop before the batch that follows this step, unless the epoch ends there
    shared     whether the data is divided among the ranks
    window     how many batches share one optimizer step
    on_batch   called before a batch with (drawn, its place in the window, whether it closes the window). Returns whether the
               next batch can do without, if its weight is 1 and it is not a piece
    on_commit  called after each commit, with `last` True when the loop ends with it
    seed       called before and after an epoch begins: `seed(epoch)`, and then `seed(epoch, rank)`
    on_wait    called with the seconds that each batch was waited for
    unwind     whether a planned stop raises MembershipChange (in a user's loop) instead of ending the iteration
    """

    def __init__(
        self,
        source: Source,
        position: Position,
        rank_info: RankInfo,
        control: Control,
        *,
        limit: int | None,
        shared: bool,
        pause_at: int | None = None,
        on_commit: Callable[..., None],
        on_batch: Callable[[Drawn, int, bool], bool] = lambda drawn, place, closing: True,
        seed: Callable[..., None] = lambda epoch, *own: None,
        on_wait: Callable[[float], None] | None = None,
        carrier: Carrier | None = None,
        window: int = 1,
        unwind: bool = False,
        training: bool = True,
        name: str = "train_loader",
    ) -> None:
        self._source, self._position, self._rank_info, self._control = source, position, rank_info, control
        self._limit, self._shared, self._unwind, self._pause_at = limit, shared, unwind, pause_at
        self._training, self._name = training, name
        self._carrier, self._on_batch, self._on_commit = carrier or Carrier(), on_batch, on_commit
        self._carries = type(self._carrier) is not Carrier
        # A window must know which batch is its last.
        self._looks_ahead = self._carrier.ahead or window > 1
        self._window_size, self._seed, self._on_wait = window, seed, on_wait
        self._usual = math.nan  # the weight of batches for which `on_batch` is not called
        self._drawn: Any = None  # a LookAhead, or an iterator
        self._ahead: Drawn | BaseException | None = None  # what `draw_ahead` drew, or the error that it got
        self._pending: Drawn | None = None
        self._window: list[Drawn] = []
        self._closing = True
        self._stepped = self._dropped = False
        self._empty_epochs = 0
        self._failure: DataLoaderFailure | None = None
        self._counts_samples = source.counts_samples
        self.fresh = self.whole = True
        self.epoch_ended = False
        self.stopped = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure  # the user's loop caught it, but only a new loader can return the next batch
        self._done()
        control, position = self._control, self._position
        if self.stopped or position.call_done:
            raise StopIteration
        if self._limit is not None and position.call_batches >= self._limit:
            self._note_end_of_epoch()
            self._finish()
            raise StopIteration
        if self._pause_at is not None and position.step >= self._pause_at and not (self._window or position.ended):
            self._pause()
        if control.interrupted if self._window else not control.begin(position.step + 1):
            self._dropped = bool(self._window)
            self._window.clear()
            self._stop()
        drawn = self._waited_for()
        batch = drawn.batch
        self._pending, self._stepped, self.fresh = drawn, False, drawn.fresh
        self.whole = self._closing = drawn.whole
        if self._looks_ahead:
            if self._window_size > 1 and drawn.whole:
                before = sum(each.whole for each in self._window)
                self._closing = self._drawn.last or before + 1 == self._window_size
        elif self._carries:
            batch = self._carrier.arrived(self._carrier.send(batch))
        if drawn.weight != self._usual or not drawn.whole:
            done = self._on_batch(drawn._replace(batch=batch), len(self._window), self._closing)
            self._usual = 1.0 if done else math.nan
        return batch

    @property
    def closing(self) -> bool:
        """Return whether the current batch, or piece, is the last one before a step."""
        return self._closing

    @property
    def current(self) -> Drawn | None:
        """Return the batch that the loop has, until it asks for the next one."""
        return self._pending

    @property
    def uncommitted(self) -> list[Drawn]:
        """Return the batches of the open window, with the current one last."""
        return self._window if self._pending is None else [*self._window, self._pending]

    @property
    def epoch(self) -> int:
        """Return the epoch of the current batch, counted from 1."""
        return self._position.epoch

    @property
    def between_epochs(self) -> bool:
        """Return whether the last batch of an epoch was returned, and the next epoch has not begun."""
        return self._position.ended

    @property
    def unused(self) -> bool:
        """Return whether neither this loop nor an earlier part of the call has asked for a batch."""
        return self._drawn is None and not self._position.call_batches and not self._position.call_done

    def draw_ahead(self) -> None:
        """Draw the batch that follows the current one, if it is certain that this call has it. An error is raised when the loop asks
        for the batch."""
        control, position = self._control, self._position
        certain = position.call_batches + 1 < position.call_expected and position.step + 1 != self._pause_at
        if not certain or control.attention or self._drawn is None or self._ahead is not None:
            return
        control.phase = "loading data"
        try:
            self._ahead = next(self._drawn, None)
        except (Exception, DataLoaderFailure) as error:
            self._ahead = error
        control.phase = "a batch"

    def end_epoch(self) -> None:
        """Skip the current batch and the rest of this epoch. All ranks must call this at the same batch."""
        self._pending = self._drawn = self._ahead = None
        self._window.clear()
        self._end_epoch()

    def stepped(self, *_: Any) -> None:
        """Note that an optimizer has applied its step: the current batch counts, whatever happens next."""
        self._stepped = True

    @property
    def applied(self) -> bool:
        """Return whether the step of the current batch was made, so that the batch counts even if an error ends the loop now."""
        return self._pending is not None and self._stepped

    def cut_short(self) -> bool:
        """End the loop after an error: commit what was applied. Return whether a batch was not applied, so that it will
        be processed again."""
        if self.applied:
            self._done(last=True)
        undone = self._dropped or self._pending is not None or bool(self._window)
        self._pending = None
        self._window.clear()
        return undone

    def leave(self) -> bool:
        """End a loop that returned. Even if batches are left, the current one counts as done. Return whether there are batches
        of an open window, which will be processed again."""
        if self._failure is not None:
            raise self._failure
        self._done()
        undone = self._dropped or bool(self._window)
        self._window.clear()
        return undone

    def _waited_for(self) -> Drawn:
        """Wait for the next batch. Raise StopIteration if there is none."""
        control, on_wait = self._control, self._on_wait
        began = time.perf_counter() if on_wait is not None else 0.0
        control.phase = "loading data"
        try:
            drawn = self._taken_ahead()
            if drawn is None and self._drawn is not None and not self._position.ended:
                drawn = next(self._drawn, None)  # nearly always, the epoch has another batch
            if drawn is None:
                drawn = self._draw()
        except DataLoaderFailure as failure:
            self._failure = failure
            raise
        if on_wait is not None:
            on_wait(time.perf_counter() - began)
        if drawn is None:
            raise StopIteration
        self._empty_epochs = 0
        control.phase = "a batch"
        return drawn

    def _taken_ahead(self) -> Drawn | None:
        """Return what `draw_ahead` drew, or raise the error that it got."""
        drawn, self._ahead = self._ahead, None
        try:
            if isinstance(drawn, BaseException):
                raise drawn
            return drawn
        finally:
            del drawn  # the error's traceback refers to this frame

    def _draw(self) -> Drawn | None:
        """Return the next batch. Only a call with a number of steps continues into the next epoch."""
        position = self._position
        while True:
            if position.ended:
                if self._limit is None and position.epoch >= position.call_epoch:
                    self._finish()  # this call's epoch had ended before a peer failed
                    return None
                self._begin_epoch()
            if self._drawn is None:
                self._drawn = self._look_ahead(self._source.batches(self._rank_info, position.offset))
                self._expect()
            drawn: Drawn | None = next(self._drawn, None)
            if drawn is not None:
                return drawn
            self._end_epoch()
            self._drawn = None
            if position.offset == 0:
                self._refuse_empty()
            if self._limit is None and position.call_batches == 0 and position.offset > 0:
                position.call_epoch += 1  # earlier calls used this epoch up: this call has the next one
                continue
            self._empty_epochs += 1
            if self._limit is None or self._empty_epochs > 1:
                self._finish()
                return None

    def _refuse_empty(self) -> None:
        """Raise an error for an epoch without a batch. Only one rank's part of a validation may be empty."""
        if not self._training and self._shared and self._source.steps_left(self._rank_info, 0) != 0:
            return
        raise ConfigError(
            f"{self._name} returned no batch: its data set is empty, or drop_last=True leaves less than one step for "
            f"{counted(self._rank_info.world_size, 'worker')}, or it is a generator that an earlier epoch used up. "
            f"Register data with at least one batch: self.register_data({self._name}=...)"
        )

    def _look_ahead(self, drawn: Iterator[Drawn]) -> LookAhead | Iterator[Drawn]:
        """Draw one batch in advance if the carrier asks for it, or if a window must know which batch is its last."""
        if not self._looks_ahead:
            return drawn
        most = None if self._limit is None else self._limit - self._position.call_batches
        return LookAhead(drawn, self._carrier, most)

    def _note_end_of_epoch(self) -> None:
        """End the epoch if a number of steps ends exactly with it, and the source knows that."""
        position = self._position
        if not position.ended and self._source.steps_left(self._rank_info, position.offset) == 0:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._position.ended = self.epoch_ended = True

    def _expect(self) -> None:
        """Note how many batches this call will have, if that is known, for progress messages."""
        position = self._position
        if self._limit is not None:
            position.call_expected = self._limit
        elif (left := self._source.steps_left(self._rank_info, position.offset)) is not None:
            position.call_expected = position.call_batches + left

    def _begin_epoch(self) -> None:
        epoch = self._position.epoch + 1
        self._seed(epoch)  # the order of the data depends on nothing else
        self._source.begin(epoch - 1, self._rank_info, self._shared)
        self._seed(epoch, self._rank_info.world_rank)
        self._position.epoch = epoch
        self._position.offset, self._position.ended = 0, False

    def _done(self, last: bool = False) -> None:
        """Note that the loop is done with the current batch. The last one of a window commits them all."""
        if self._pending is None:
            return
        position, window = self._position, self._window
        window.append(self._pending)
        self._pending = None
        if not self._closing:
            return
        for drawn in window:
            if drawn.rows is None:
                position.call_units += drawn.offset - position.offset if self._counts_samples else 0
            elif drawn.whole:
                position.call_units += drawn.rows
            position.offset = drawn.offset
        batches = len(window) if len(window) == 1 else sum(each.whole for each in window)
        position.step += batches
        position.call_batches += batches
        window.clear()
        self._control.batch = position.call_batches
        self._on_commit(last=last)

    def _finish(self) -> None:
        self._position.call_done = True
        self._on_commit(last=True)

    def _pause(self) -> None:
        """Stop, unless the epoch ends here."""
        self._note_end_of_epoch()
        if not self._position.ended:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        if self._unwind:
            raise MembershipChange
        raise StopIteration

"""The steps of one loop over the data: draw them, and decide when the loop ends or stops.
Worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from raysgd.core.control import Control
from raysgd.core.outcomes import DataLoaderFailure
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, counted
from raysgd.replica.steps.asking import Asking
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import AFTER_STEP, NO_POLICIES, Drawn, Policies, Step


class MembershipChange(BaseException):
    """Raised inside a user's `train_epoch` to end it at a batch boundary; it is called again for
    the rest of the epoch.

    This is not an Exception, so that user code that catches the errors of its batches does not
    catch it.
    """


class Source(Protocol):
    """Draws one rank's batches. It does not know what is committed: the caller passes the offset.
    `loader` is the data for which it was opened."""

    loader: Any

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Prepare a new epoch; `epoch` epochs were begun before it."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """This rank's part of the rest of the epoch."""

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        """How many steps of the epoch are left after `offset`, or None if that is not known."""


class Carrier:
    """Transfers batches to the model's device. This one leaves them where they are.

    `send` starts a transfer, and `arrived` returns the batch when it is needed. `ahead` is whether
    one batch should be sent in advance.
    """

    ahead = False

    def send(self, batch: Any) -> Any:
        return batch

    def arrived(self, sent: Any) -> Any:
        return sent


class Reader:
    """Reads the batches of an epoch, at most one in advance: with `ahead`, always, so that it is
    being transferred, and `last` is known.

    It never draws more than `most` batches, because an unused batch would have to be drawn again.
    An error of one that was read in advance is raised when that batch is asked for.
    """

    def __init__(self, drawn: Iterator[Drawn], carrier: Carrier, most: int | None = None, *, ahead: bool) -> None:
        self._drawn, self._carrier, self._rest, self._ahead = drawn, carrier, most, ahead
        self._carries = type(carrier) is not Carrier
        self._has_next = False
        self._next: Drawn | BaseException | None = None

    @property
    def last(self) -> bool:
        """Whether the batch that was returned last is known to be the last one."""
        return self._has_next and self._next is None

    def read_ahead(self) -> None:
        """Read the next batch, unless that has been done."""
        if self._has_next:
            return
        try:
            drawn = None if self._rest == 0 else next(self._drawn, None)
            if drawn is not None:
                if self._rest is not None:
                    self._rest -= drawn.last_part
                if self._carries:
                    drawn = drawn._replace(batch=self._carrier.send(drawn.batch))
            self._next = drawn
        except (Exception, DataLoaderFailure) as error:
            self._next = error
        self._has_next = True

    def read(self) -> Drawn | None:
        """Read the next batch, or None at the end."""
        if not (self._has_next or self._ahead or self._carries):
            return next(self._drawn, None)
        self.read_ahead()
        drawn, self._has_next, self._next = self._next, False, None
        try:
            if isinstance(drawn, BaseException):
                raise drawn
            if drawn is None:
                self._has_next = True  # so it stays
                return None
            if self._ahead:
                self.read_ahead()
            return drawn._replace(batch=self._carrier.arrived(drawn.batch)) if self._carries else drawn
        finally:
            del drawn  # an error's traceback refers to this frame


class NoFeed:
    """What an operator has without a loop of its replica: each batch that user code passes to it is
    a step of its own."""

    epoch: int | None = None
    between_epochs = True
    stopped = False
    make_info: Callable[..., dict[str, Any]] = dict

    def __init__(self, policies: Policies = NO_POLICIES) -> None:
        self.position, self.step, self.batches = Position(), Step(policies=policies), None


class Feed:
    """Yields the steps of one loop: what follows the position. A step is yielded once for each of
    its batches or parts; with the last one it is `closing`, and the caller commits it before it
    asks for the next one.

    source      draws the batches
    position    what is committed; the feed itself changes it only when an epoch begins or ends
    limit       how many batches the call may have; None for the rest of the epoch
    most        at which of them it ends, although it may have more, because an error has ended it
                there
    asking      asks for checkpoints between two batches
    shared      whether the data is divided among the ranks
    window      how many batches share one optimizer step
    policies    of the operator; those that do not act in usual steps get the first one of a loop,
                the unusual ones, and the step after each, in which they go back to the usual
    seed        called with its place before an epoch begins, and before each of its parts
                (`Places`)
    call, name  what the loop is for, and what its data is called

    ahead        whether the next batch is read with the current one, which is always so of a window
                 that must know which batch is its last
    batches      what the operator's loop iterates over
    info         what it got
    make_info    makes the dict that `train_batch` gets
    step         the newest step
    stopped      whether the loop was ended by MembershipChange, with batches left
    waited_s     how long batches were waited for
    hidden_s     of that, while gradients were exchanged
    agreed_s     how long the source has waited for the other ranks to agree on batches
    parts        how many batches, or parts of batches, were read
    """

    make_info: Callable[..., dict[str, Any]] = dict

    def __init__(
        self,
        source: Source,
        position: Position,
        rank_info: RankInfo,
        control: Control,
        *,
        limit: int | None = None,
        most: int | None = None,
        asking: Asking | None = None,
        shared: bool = False,
        window: int = 1,
        policies: Policies = NO_POLICIES,
        carrier: Carrier | None = None,
        seed: Callable[..., None] | None = None,
        call: str = "train",
        name: str = "train_loader",
    ) -> None:
        self.source, self.position, self.rank_info, self._control = source, position, rank_info, control
        self._limit, self._asking, self._shared, self._window = limit, asking, shared, window
        self._most = limit if most is None else most
        self._carrier, self._seed, self.call, self._name = carrier or Carrier(), seed, call, name
        self.policies = policies
        self.training = call == "train"
        self._begins_at = 0 if self.training else position.offset  # in the first pass: an evaluation can continue one
        self._reader: Reader | None = None  # of the running epoch
        self.ahead = self._carrier.ahead or window > 1
        self.step = Step(policies=policies.usual())  # for steps that user code makes before the first batch
        self.batches: Any = None
        self.info: Mapping[str, Any] = {}
        self.failure: BaseException | None = None  # of the data
        self.stopped = False
        self.waited_s = self.hidden_s = self.agreed_s = 0.0
        self.parts, self._voted_s = 0, getattr(source, "voted_s", 0.0)

    def __iter__(self) -> Iterator[Step]:
        position, control, window = self.position, self._control, self._window
        every, unusual = self.policies, True
        usual: Policies | None = None  # the first step shows which have nothing to do in usual ones
        while not position.call_done:
            begins = self.step.closing  # what was asked for before it is committed, or undone
            if begins:
                if self._most is not None and position.call_batches >= self._most:
                    self.note_end_of_epoch()
                    position.call_done = True
                    return
                if self._asking is not None and position.step >= self._asking.step:
                    self._ask(self._asking)
                if not control.begin(position.step + 1):
                    self._stop()
            elif control.interrupted:
                self._stop()
            drawn = self._read()
            if drawn is None:
                assert begins, "a source ends with a whole batch, and a reader ahead knows the last one"
                position.call_done = True
                return
            if begins:
                after, unusual = unusual, window > 1 or drawn.weight != 1.0 or not drawn.last_part
                if not (unusual or after):
                    usual = usual or every.usual()
                self.step = Step(drawn, every if unusual or after else usual, ends=self.training)
            else:
                self.step.add(drawn)
            if window > 1 and drawn.last_part:  # it is shorter at the end of an epoch or call
                assert self._reader is not None
                self.step.closing = self.step.batches == window or self._reader.last
            if self._seed is not None:
                self._enter_part(self._seed)
            yield self.step

    @property
    def epoch(self) -> int:
        """The epoch of the current batch, counted from 1."""
        return self.position.epoch

    @property
    def between_epochs(self) -> bool:
        """Whether the last batch of an epoch was returned, and the next epoch has not begun."""
        return self.position.ended

    @property
    def unused(self) -> bool:
        """Whether neither this loop nor an earlier part of the call has asked for a batch."""
        return self._reader is None and not self.position.call_batches and not self.position.call_done

    def finish(self) -> None:
        """Note that the loop has no further batch. User code can still make steps of its own."""
        self.step = Step(policies=self.policies.usual())
        for after_loop in self.policies.after_loop if self.training else ():
            after_loop()

    def read_ahead(self) -> None:
        """Read the batch that follows the current one, if it is certain that this call has it."""
        control, position = self._control, self.position
        certain = position.call_batches + 1 < position.call_expected
        if certain and not control.attention and self._reader is not None:
            began, control.phase = time.perf_counter(), "loading data"
            self._reader.read_ahead()
            if self._carrier.ahead:
                self.waited_s += time.perf_counter() - began
            control.phase = "a batch"

    def reopen(self) -> None:
        """Let the source divide the rest of the epoch in another way, from the next step on."""
        self._reader = None

    def enter_step(self) -> None:
        """Seed for what is called once after a step, alike on all ranks."""
        if self._seed is not None:
            self._seed(epoch=self.position.epoch, offset=self.position.offset, part=AFTER_STEP)

    def _enter_part(self, seed: Callable[..., None]) -> None:
        drawn = self.step.current
        if drawn.first is not None:
            seed(epoch=self.position.epoch, offset=drawn.first)
        else:
            seed(epoch=self.position.epoch, offset=drawn.offset, part=drawn.part)

    def _read(self) -> Drawn | None:
        """Wait for the next batch. Return None if the call has no more."""
        began = time.perf_counter()
        self._control.phase = "loading data"
        try:
            drawn = None if self._reader is None or self.position.ended else self._reader.read()
            if drawn is None:
                drawn = self._next()
        except BaseException as failure:
            self.failure = failure  # only a new loop can return the next batch
            raise
        before, self._voted_s = self._voted_s, getattr(self.source, "voted_s", 0.0)
        self.agreed_s += self._voted_s - before
        self.waited_s += time.perf_counter() - began - (self._voted_s - before)
        if drawn is not None:
            self.parts += 1
            self._control.phase = "a batch"
        return drawn

    def _next(self) -> Drawn | None:
        """Read the next batch. Only a call with a number of steps continues into the next epoch."""
        position, empty = self.position, 0
        while True:
            if position.ended:
                if self._limit is None and position.epoch >= position.call_epoch:
                    return None  # this call's epoch had ended before a peer failed
                self._begin_epoch()
            if self._reader is None:
                self._reader = self._open()
            drawn = self._reader.read()
            if drawn is not None:
                return drawn
            self._end_epoch()
            self._reader = None
            if position.offset == 0:
                self._refuse_empty()
            if self._limit is None and position.call_batches == 0 and position.offset > 0:
                position.call_epoch += 1  # earlier calls used this epoch up: this call has the next one
                continue
            # In an evaluation, only the other ranks may have parts of the last step: it counts on all.
            steps = 0 if self.training else self.source.steps_left(self.rank_info, position.offset) or 0
            position.call_batches, empty = position.call_batches + steps, empty + (not steps)
            if self._limit is None or position.call_batches >= self._limit or empty > 1:
                return None

    def _open(self) -> Reader:
        """Open the rest of the epoch, and note how many batches this call will have, if that is
        known, for progress messages."""
        position = self.position
        most = None if self._most is None else self._most - position.call_batches
        batches = self.source.batches(self.rank_info, position.offset)
        if self._limit is not None:
            position.call_expected = self._limit
        elif (rest := self.source.steps_left(self.rank_info, position.offset)) is not None:
            position.call_expected = position.call_batches + rest
        return Reader(batches, self._carrier, most, ahead=self.ahead)

    def _begin_epoch(self) -> None:
        epoch = self.position.epoch + 1
        if self._seed is not None:
            self._seed(epoch=epoch)  # the order of the data depends on nothing else
        self.source.begin(epoch - 1, self.rank_info, self._shared)
        self._control.ensure_whole()  # the order, of which rank 0 may have sent a part
        self._reader = None
        self.position.epoch = epoch
        self.position.ended, self.position.epoch_batches = False, 0
        self.position.offset, self._begins_at = self._begins_at, 0

    def _end_epoch(self) -> None:
        self.position.ended = self.position.call_ended = True

    def note_end_of_epoch(self) -> None:
        """End the epoch if this call, or what it has made up to now, ends exactly with it, and the
        source knows that."""
        position = self.position
        if not position.ended and self.source.steps_left(self.rank_info, position.offset) == 0:
            self._end_epoch()

    def _ask(self, asking: Asking) -> None:
        """Make a checkpoint if it is due, unless the epoch ends here: that after the call has all
        that this one would have."""
        self.note_end_of_epoch()
        if self.position.ended or (self._reader is not None and self._reader.last):
            return
        try:
            asking.ask()
        except BaseException as failure:
            self.failure = failure  # this loop has ended, also if the user's code catches it
            raise

    def _refuse_empty(self) -> None:
        """Raise an error for an epoch without a batch. Only one rank's part of a validation may be
        empty."""
        if not self.training and self._shared and self.source.steps_left(self.rank_info, 0) != 0:
            return
        raise ConfigError(
            f"{self._name} returned no batch: its data set is empty, or drop_last=True leaves less than one step for "
            f"{counted(self.rank_info.world_size, 'worker')}, or it is a generator that an earlier epoch used up. "
            f"Register data with at least one batch: self.register_data({self._name}=...)"
        )

    def _stop(self) -> None:
        self.stopped = True
        raise MembershipChange

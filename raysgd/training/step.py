"""The optimizer step as an object: its batches, what they count, and what became of it. Worker.

    for step in feed:                       # draws, in `training/feed.py`
        for batch in step:
            operator.train_batch(batch, ...)    # self.zero_grad, self.backward and self.step act on the step
        commit(step)                        # `ReplicaBase`: position, policies, progress, snapshot

Each outcome has one writer: a step is "applied" when an optimizer has stepped, "skipped" if a
policy leaves it out, and "undone" if the loop ends before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from raysgd.training.feed import Feed

Outcome = Literal["open", "applied", "skipped", "undone"]


class Drawn(NamedTuple):
    """One rank's batch.

    offset  the position in the epoch once the batch is committed
    fresh   False if its samples are repeated, by a rank that has none left but must take part in
            the step
    rows    the samples of all ranks' batches together, if the source counts them
    weight  this rank's part of these samples, relative to an equal share (`RankPart`)
    whole   False if this is one of several pieces of the rank's batch, and not the last one
    units   this rank's samples, as (start, stop) of the epoch's order; None if the source has no
            order
    """

    batch: Any
    offset: int
    fresh: bool = True
    rows: int | None = None
    weight: float = 1.0
    whole: bool = True
    units: tuple[int, int] | None = None


class Step:
    """What one optimizer step is made of, and what became of it. Iterating over it draws its
    batches.

    drawn      this rank's batches up to now: one, the pieces of one, or those of an accumulation
               window. The last one is `current`, and only that one has its content
    place      how many batches or pieces came before the current one
    batches    how many batches of the loader these are. The pieces of one count together, with the
               last one
    closing    whether the current batch is the last one before the optimizer's step
    outcome    "open"; "applied" when an optimizer has stepped, "skipped" if all ranks have left the
               step out, "undone" if its batches will be drawn again
    committed  whether the position is behind it
    samples    how many samples the current batch counts among those that share the step, if there
               are several batches
    metrics    what the batches measured before the last one: values, weight, and whether no piece
               follows
    """

    __slots__ = (
        "_more",
        "batches",
        "closing",
        "committed",
        "current",
        "drawn",
        "metrics",
        "outcome",
        "place",
        "samples",
    )

    def __init__(self, first: Drawn | None = None, more: Callable[[Step], Iterator[Any]] | None = None) -> None:
        """Begin with its first batch; `more` yields the content of all. Without one, this is a step
        that user code makes by itself."""
        self.current = first or NOTHING
        self.drawn, self.committed = [] if first is None else [first], first is None
        self.place, self.batches = 0, int(self.current.whole)
        self.closing = self.current.whole
        self.outcome: Outcome = "open"
        self.samples = 1.0
        self.metrics: list[tuple[dict[str, Any], Any, bool]] = []
        self._more = more

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._more is None else self._more(self)

    def add(self, drawn: Drawn) -> None:
        """Note the next batch, which is the current one now."""
        self.drawn[-1] = self.current._replace(batch=None)
        self.drawn.append(drawn)
        self.current, self.closing = drawn, drawn.whole
        self.place += 1
        self.batches += drawn.whole

    @property
    def piece(self) -> int:
        """Return how many pieces of the same batch came before the current one."""
        begin = self.place
        while begin > 0 and not self.drawn[begin - 1].whole:
            begin -= 1
        return self.place - begin

    @property
    def ended(self) -> bool:
        """Return whether the step is committed or undone."""
        return self.committed or self.outcome == "undone"

    def apply(self, *_: Any) -> None:
        """Note that an optimizer has made its step: it counts, whatever happens next."""
        self.outcome = "applied"

    def skip(self) -> None:
        """Note that the step of an optimizer was left out, on all ranks."""
        if self.outcome == "open":
            self.outcome = "skipped"

    def counts(self, *, failed: bool) -> bool:
        """Return whether the step counts if the loop leaves it now: after an error if it was
        applied, otherwise if it is complete."""
        return self.outcome == "applied" if failed else self.closing


class Policy:
    """Takes part in steps, or observes them. An operator has a list of policies, which act in this
    order; by default they do nothing."""

    def on_epoch(self, feed: Feed) -> None:
        """Called before a loop over an epoch, or over the rest of it. `feed` has what the loop
        reads, and the running step."""

    def begin(self, step: Step) -> None:
        """Called before each batch or piece, which is `step.current` now."""

    def on_step(self, step: Step) -> None:
        """Called when a step has ended. It is "undone", or "applied" or "skipped" and committed."""

    def rest(self) -> None:
        """Called after a loop, which an error may have ended: no step is open."""


def acting(policies: Iterable[Any], base: type[Any], method: str) -> list[Callable[..., Any]]:
    """Return this method of those policies for which it does something."""
    default = getattr(base, method)
    return [getattr(each, method) for each in policies if getattr(type(each), method, default) is not default]


NOTHING = Drawn(None, 0)

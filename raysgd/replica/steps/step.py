"""The optimizer step as an object: its batches, what they count, and what became of it. Worker.

    for step in feed:                       # draws, in `replica/steps/feed.py`: once for each part of a batch
        step.keep()                         # what returns if it is undone
        for begin_part in step.policies.begin_part:
            begin_part(step)
        operator.train_batch(step.current.batch, ...)   # self.zero_grad, self.backward and self.step act on the step
        if step.closing:
            commit(step)                    # `StepLoop`: position, policies, progress, snapshot

Each outcome has one writer: a step is "applied" when an optimizer has stepped, "skipped" if a
policy leaves it out, and "undone" if the loop ends before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

Outcome = Literal["open", "applied", "skipped", "undone"]


ONCE, AFTER_STEP = -1, -2  # the parts of random numbers that belong to no part of a batch; the latter of `on_step`


class Drawn(NamedTuple):
    """One rank's batch.

    offset     the position in the epoch once the batch is committed
    fresh      False if its samples are repeated, by a rank that has none left but must take part in
               the step
    rows       the samples of all ranks' batches together, if the source counts them
    weight     this rank's part of these samples, relative to an equal share (`RankShare`)
    last_part  False if another part of the same batch follows on this rank
    indices    of this rank's samples in the data set; None if the source does not divide by index
    first      the place of the first of them in the epoch's order
    part       which of the batch's parts this is, on any rank: of data that is not divided by
               index, the rank
    samples    how many these are, None if an item of the data set is a batch
    """

    batch: Any
    offset: int
    fresh: bool = True
    rows: int | None = None
    weight: float = 1.0
    last_part: bool = True
    indices: list[Any] | None = None
    first: int | None = None
    part: int = 0
    samples: int | None = None


class Policies:
    """Policies (`replica/steps/step_policy.py`) in their order, and for each method those that do
    something in it. `option` is the first that forbids torch's own methods."""

    def __init__(self, every: Sequence[Any] = ()) -> None:
        self.every = every
        self.option = next((each.option for each in every if each.option), "")
        self.restoring = [each for each in every if each.acts_in("put_back")]
        self.begin_loop, self.begin_part = self._acting("begin_loop"), self._acting("begin_part")
        self.before_commit, self.end_step = self._acting("before_commit"), self._acting("end_step")
        self.reset, self.after_loop = self._acting("reset"), self._acting("after_loop")
        self.on_zero_grad, self.on_backward = self._acting("on_zero_grad"), self._acting("on_backward")
        self.on_partial_step, self.on_whole_step = self._acting("on_partial_step"), self._acting("on_whole_step")
        self.on_gradients, self.after_step = self._acting("on_gradients"), self._acting("after_step")
        self.on_other_step, self.on_direct_step = self._acting("on_other_step"), self._acting("on_direct_step")
        self.after_batch = self._acting("after_batch")

    def _acting(self, method: str) -> list[Callable[..., Any]]:
        return [getattr(each, method) for each in self.every if each.acts_in(method)]

    def usual(self) -> Policies:
        return Policies([each for each in self.every if each.in_usual_steps])


class Step:
    """What one optimizer step is made of, and what became of it.

    drawn      this rank's batches up to now: one, its parts of one, or those of an accumulation
               window. The last one is `current`, and only that one has its content
    policies   those that take part in it
    place      how many batches or parts came before the current one
    parts_before  how many parts of the same batch came before the current one, on this rank
    batches    how many batches of the loader these are. The parts of one count together, with the
               last one
    closing    whether the current batch is the last one before the optimizer's step
    outcome    "open"; "applied" when an optimizer has stepped, "skipped" if all ranks have left the
               step out, "undone" if its batches will be drawn again
    committed  whether the position is behind it
    failed     whether an error has ended it
    error      of a failed peer, raised again before another step is made or committed, if user code
               has caught it
    share      the part of the current batch's samples in the step, relative to a batch alone, if
               the window has all of its batches
    count      what the newest `self.backward` got as `count`; None for samples
    metrics    what the batches measured before the last one: values, weight, and whether no part of
               the same batch follows
    notes      what policies note of this step alone, by policy
    ends       whether its loop ends it: no loop of an evaluation does

    The step alone decides when policies keep something, and when they put it back: if it is undone,
    and, before each further part of a batch, what all of them begin with.
    """

    __slots__ = (
        "_at_batch",
        "_at_step",
        "batches",
        "closing",
        "committed",
        "count",
        "current",
        "drawn",
        "ends",
        "error",
        "failed",
        "metrics",
        "notes",
        "outcome",
        "parts_before",
        "place",
        "policies",
        "share",
    )

    def __init__(self, first: Drawn | None = None, policies: Policies | None = None, *, ends: bool = True) -> None:
        """Begin with its first batch. Without one, this is a step that user code makes by
        itself."""
        self.ends = ends
        self.current = first or NOTHING
        self.drawn, self.committed = [] if first is None else [first], first is None
        self.policies = policies or NO_POLICIES
        self.place, self.parts_before, self.batches = 0, 0, int(self.current.last_part)
        self.closing = self.current.last_part
        self.outcome: Outcome = "open"
        self.failed = False
        self.error: Exception | None = None
        self.share = 1.0
        self.count: Any = None
        self.metrics: list[tuple[dict[str, Any], Any, bool]] = []
        self.notes: dict[Any, Any] = {}
        self._at_step: Sequence[Any] = ()  # what its policies have kept at its beginning,
        self._at_batch: Sequence[Any] = ()  # and at that of the current batch, if it has several parts

    def keep(self) -> None:
        """Let policies keep what they put back, before the step or a batch begins. Before a further
        part of it, let them put that back."""
        restoring = self.policies.restoring
        if self.place == 0:
            self._at_step = self._at_batch = [each.kept(self) for each in restoring]
        elif self.parts_before > 0:
            for each, value in zip(restoring, self._at_batch, strict=True):
                if each.for_each_part:
                    each.put_back(self, value)
        elif not self.current.last_part:
            self._at_batch = [each.kept(self) if each.for_each_part else None for each in restoring]

    def undo(self) -> None:
        """Let policies put back what they have kept when it began: its batches will be drawn
        again."""
        self.outcome = "undone"
        for each, value in zip(self.policies.restoring, self._at_step, strict=False):  # none before the first batch
            each.put_back(self, value)

    def add(self, drawn: Drawn) -> None:
        """Note the next batch, which is the current one now."""
        self.parts_before = 0 if self.current.last_part else self.parts_before + 1
        self.drawn[-1] = self.current._replace(batch=None)
        self.drawn.append(drawn)
        self.current, self.closing = drawn, drawn.last_part
        self.place += 1
        self.batches += drawn.last_part

    @property
    def ended(self) -> bool:
        return self.committed or self.outcome == "undone"

    def counts(self, *, failed: bool) -> bool:
        """Whether the step counts if the loop leaves it now: after an error if it was applied,
        otherwise if it is complete."""
        return self.outcome == "applied" if failed else self.closing


NOTHING, NO_POLICIES = Drawn(None, 0), Policies()

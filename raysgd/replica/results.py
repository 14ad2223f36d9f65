"""What a call of an operator returns on one rank, and what it has measured so far. Worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.measures.metrics import (
    COUNTED,
    OWN_NAMES,
    Measured,
    check_metrics,
    for_all_ranks,
    plain,
    refuse_own_names,
)
from raysgd.errors import counted, shown
from raysgd.replica.calls import CALLS, Phase
from raysgd.replica.internals import Internals
from raysgd.replica.steps.feed import Feed

UNUSED = (
    "%s.train_epoch has not used the iterator that it got. This call of train() counts no batches and no samples, and the epoch stays "
    "%d. The data of its own loop is not divided among the workers, and after a worker failure the call begins again. Loop over the "
    "iterator: `for batch in iterator:`"
)
LEFT_EARLY = (
    "%s.train_epoch has left its loop %s before the end of the epoch, so the next call of train() continues this epoch there. For calls "
    "of n batches, pass num_steps=n. Ignore this if you want that"
)
OTHER_ROWS = (
    "each worker has made another split of the data: the {loader} has {theirs} on rank {high}, and {ours} on rank {low}. Some "
    "rows are used several times, and validations use rows of the training data. Let setup() make the same data on every worker, for "
    "example with random_split(..., generator=torch.Generator().manual_seed(0)), or pass seed=... to the trainer. If you divide the data "
    "yourself, pass add_dist_sampler=False"
)


class Results(ABC):
    """Owns what was committed before the running part of a call of `train`, and makes the results
    of calls: from what the operator returns, its metrics, and what a framework adds."""

    def __init__(self, operator: Any, internals: Internals) -> None:
        self._operator, self._internals = operator, internals
        self._units_before, self._drawn_before = 0, 0.0  # what was committed before this part of the call

    def begin(self, phase: Phase, *, profile: bool, new_call: bool) -> None:
        """Reset the timers and metrics. With `new_call` False, the call continues after a change of
        the group."""
        internals, timers = self._internals, self._operator.timers
        internals.end_loop()
        internals.begin_metrics()
        internals.testing = phase == "test"
        if phase == "train":
            self.begin_part()
        timers.reset()
        timers.enabled = profile

    def so_far(self, result: dict[str, Any] | None = None) -> Measured:
        """What the running call has measured so far."""
        internals = self._internals
        values = result if result and isinstance(result, dict) else internals.meter.summary()
        values = self._named_for_test(values) if internals.testing else values
        return self.measured({"epoch": internals.position.users_epoch, **values, **self._counts()})

    def begin_part(self) -> None:
        """Note that what follows is another part of the running call."""
        self._units_before, self._drawn_before = self._internals.position.call_units, self._internals.position.drawn

    def of_all_ranks(self) -> Callable[[], Measured]:
        """What this part of the call has measured so far, with the samples of all ranks. Another
        thread asks for it, because that waits for the device."""
        internals, meter = self._internals, self._internals.meter.copy()
        committed, ranks = internals.position.call_units - self._units_before, internals.rank_info.world_size
        others = self.so_far({BATCH_COUNT: meter.batch_count})

        def read() -> Measured:
            metrics = for_all_ranks({**others.metrics, **meter.summary()}, ranks, others.drawn, committed)
            known = committed and metrics[NUM_SAMPLES] == committed
            return replace(others, metrics=metrics, drawn=committed if known else others.drawn)

        return read

    def to_report(self) -> Measured | None:
        """What the running call has measured so far, for a progress message."""
        return self.so_far()

    def measured(self, metrics: dict[str, Any]) -> Measured:
        """These metrics of the running call of `train`, with what users do not see."""
        position, ranks = self._internals.position, self._internals.rank_info.world_size
        drawn = round((position.drawn - self._drawn_before) / ranks)
        return Measured(metrics, position.call_units, drawn, self.batch_mode())

    def _counts(self) -> dict[str, Any]:
        """The counts of the running call that are not the operator's metrics."""
        return {}

    def of_call(self, result: Any, profile: bool, phase: Phase, reduced: bool) -> Measured:
        """The result of a call on this rank."""
        method = "train_epoch" if phase == "train" else "validate"
        returned: tuple[Any, ...] = ()
        if not isinstance(result, dict):
            if reduced:
                raise TypeError(
                    f"{type(self._operator).__name__}.{method} must return a dict of results, got {shown(result)}. For a list "
                    f"of what each worker returned, of any type, call trainer.{CALLS[phase]}(reduce_results=False)"
                )
            result, returned = {}, (result,)
        else:
            check_metrics(result, of=f"{type(self._operator).__name__}.{method} returned an invalid result")
        report: dict[str, Any] = dict(result)
        counts = {name for name in COUNTED if isinstance(plain(result.get(name, 0)), Real)}
        names = (OWN_NAMES if phase == "train" else COUNTED) - counts
        refuse_own_names(result, of=f"{type(self._operator).__name__}.{method}", names=names)
        if phase == "train":
            report = {"epoch": self._internals.position.users_epoch, **result, **self._counts()}
        others = self.add_metrics(report, phase)
        if phase == "test":
            report = self._named_for_test(report)
        if profile:
            report["profile"] = self._operator.timers.stats()
        measured = self.measured(report) if phase == "train" else Measured(report)
        return replace(measured, returned=returned, **others)

    def warn_of_own_loop(self, feed: Feed) -> None:
        """Warn, once, if the user's own loop has left the iterator unused, or before its end."""
        internals, position = self._internals, self._internals.position
        name = type(self._operator).__name__
        if feed.unused:
            internals.warn_once(UNUSED, name, position.epoch)
        elif internals.num_steps is None and not position.ended:
            rest = feed.source.steps_left(feed.rank_info, position.offset)
            if rest:
                internals.warn_once(LEFT_EARLY, name, counted(rest, "batch", "batches"))

    def _named_for_test(self, report: dict[str, Any]) -> dict[str, Any]:
        """A test's report with "test_" in the names that a validation's metrics have, unless there
        is such a name."""
        named: dict[str, Any] = {}
        for name, value in report.items():
            last, bare = ("last_", name[5:]) if name.startswith("last_") else ("", name)
            for prefix in ("val_", self._internals.prefix):
                other = f"{last}test_{bare.removeprefix(prefix)}"
                if bare.startswith(prefix) and other not in report:
                    name = other
                    break
            named[name] = value
        return named

    # -- what frameworks do differently ---------------------------------------------------------------

    @abstractmethod
    def batch_mode(self) -> str:
        """What was decided about the batch."""

    @abstractmethod
    def add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        """Add the registered metrics to a report. Return what else is in `Measured`. All ranks call
        this together."""

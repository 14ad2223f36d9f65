"""The contract of `train_batch`, by which a batch is divided into parts that any worker can
compute: `ElasticConfig(batch="auto")`. Pure. Worker.

It is called once for each part. In each, it clears gradients, makes its backward passes, and then
at most one step of each optimizer. What does not do that is "per_worker".
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

LAST = "last_part"  # an entry of `batch_info`
DICT: Any = dict


class Violation(NamedTuple):
    """What prevents that a batch is divided into parts, and what to do about it."""

    problem: str
    advice: str


LINES = "let train_batch call self.zero_grad(), self.backward(loss) and self.step(), in this order"
SHARED = f"{LINES}, and pass TrainingOptions(accumulate=n) if batches share a step"
DIRECT = Violation("train_batch calls optimizer.step() itself", LINES)
CLEARED_LATE = Violation(
    "train_batch calls self.zero_grad() after a backward pass", "clear gradients only before it (SAM cannot do that)"
)
NOT_CLEARED = Violation("train_batch makes a backward pass without self.zero_grad() before it", SHARED)
SEVERAL_ROUNDS = Violation(
    "train_batch makes a backward pass after a step, as in a GAN", "make all backward passes before the first step"
)
STEPPED_ALONE = Violation("train_batch makes a step without self.backward(loss)", LINES)
STEPPED_TWICE = Violation("train_batch makes several steps of one optimizer", "make one step of each in a batch")
NOT_STEPPED = Violation("train_batch makes no step with the helpers of the operator", SHARED)
TOGETHER = Violation(
    "train_batch makes collective calls before the backward pass", "compute the loss with this worker's samples only"
)
SCHEDULED = Violation(
    "train_batch steps a scheduler", "pass scheduler_step_freq='batch' or 'step', or step it in on_step(self, info)"
)
CHANGED = Violation(
    "train_batch changes or clears gradients between the backward passes of two parts of a batch",
    "pass TrainingOptions(clip_norm=...), or change them if batch_info['last_part'], and clear them with self.zero_grad() only",
)
CHANGED_AFTER = Violation(
    "train_batch changes gradients after the backward pass",
    "pass TrainingOptions(clip_norm=...), or change them if batch_info['last_part']",
)
UNLIKE = Violation(
    "train_batch calls self.backward or self.step in some parts of a batch only",
    "call them in each part, with count=0 where there is nothing to learn",
)
OWN_LOOP = Violation(
    "train_epoch has a loop of its own, or gives the default one another iterator",
    "leave train_epoch out, and write what belongs to the step in on_step(self, info)",
)
OWN_ITERATION = Violation("the DataLoader's class has an __iter__ of its own", "leave it out")
NOT_DIVIDED = Violation(
    "this kind of data is not divided by index", "register a DataLoader of a data set with __getitem__ and __len__"
)


class Calls:
    """Checks the order of the helpers' calls in one part."""

    def __init__(self) -> None:
        self._cleared, self._passes, self._stepped = False, 0, set[int]()

    def cleared(self) -> Violation | None:
        self._cleared = True
        return (SEVERAL_ROUNDS if self._stepped else CLEARED_LATE) if self._passes else None

    def passed(self) -> Violation | None:
        """Note a backward pass."""
        self._passes += 1
        return SEVERAL_ROUNDS if self._stepped else None if self._cleared else NOT_CLEARED

    def stepped(self, optimizer: int) -> Violation | None:
        known = optimizer in self._stepped
        self._stepped.add(optimizer)
        return STEPPED_TWICE if known else None if self._passes else STEPPED_ALONE

    def ended(self) -> Violation | None:
        return None if self._stepped else NOT_STEPPED

    def unlike(self, other: Calls) -> Violation | None:
        """Compare with another part of the same batch."""
        alike = self._stepped == other._stepped and bool(self._passes) == bool(other._passes)
        return None if alike else UNLIKE


class NotingInfo(MutableMapping[str, Any], DICT):  # type: ignore[misc]
    """`batch_info` that notes whether user code has read "last_part", or all entries: methods that
    are not here, and `{**info}`, use these."""

    asked = False

    def __getitem__(self, name: str) -> Any:
        self.asked = self.asked or name == LAST
        return dict.__getitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    __setitem__, __delitem__, __len__ = DICT.__setitem__, DICT.__delitem__, DICT.__len__


def later(breach: Violation, parts: int) -> str:
    """The error of code that follows the contract in the first step, and not in this one."""
    return (
        f"{breach.problem}, unlike in the first step of this run. A worker computes several of the {parts} parts of a batch now, with one "
        f"step after the last of them. raysgd has undone this step. To fix this, {breach.advice}; or pass "
        "ElasticConfig(batch='per_worker')"
    )


def refused(breach: Violation, parts: int) -> str:
    """Return the error of code or data that does not follow the contract, if the user has passed
    `parts`."""
    return f"parts={parts} needs code and data that can be divided, but {breach.problem}. To fix this, {breach.advice}; or leave parts out"


def notice(breach: Violation, parts: int) -> str:
    """What the log says of code or data that does not follow the contract."""
    return (
        f"{breach.problem}, so a batch cannot be divided into parts. While some of the {parts} workers are missing, steps have fewer "
        f"samples, and results differ from those of an undisturbed run. To keep the batch, {breach.advice}. To accept smaller steps, pass "
        "ElasticConfig(batch='per_worker')"
    )

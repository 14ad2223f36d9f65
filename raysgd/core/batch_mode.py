"""Decide whether the batch of all workers together stays what it is when their number changes:
`ElasticConfig(batch="auto")`. Pure. Both.

Fewer workers keep it if each processes its part in several pieces, and steps after the last one.
That is exact if the user's code does nothing in a piece that it ought to do once in a batch. What
the code has done in the first step that was committed decides, on every rank alike; what cannot be
decided surely is "per_worker".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raysgd.errors import counted

GLOBAL, PER_WORKER = "global", "per_worker"
ONCE = ["zero_grad", "backward", "step"]
LINES = (
    "write in train_batch\n    self.zero_grad()\n    self.backward(loss)\n    self.step()\nonce each and in this order"
)
SCHEDULERS = "pass scheduler_step_freq='batch' or 'step', so that the trainer steps it after the last piece"
NOT_HARMFUL = "pass ElasticConfig(batch='global') if that does no harm"


class BatchMode(NamedTuple):
    """What was decided. Part of a replica's state, as a tuple.

    mode      "global" or "per_worker"; "" before the first step is committed
    reason, advice  for "per_worker": what prevents "global", and what to do about it
    in_parts  for "global": whether pieces are the parts that the missing workers would have had, so
              that whatever is computed with all samples of a piece (BatchNorm, a mean over tokens)
              stays what it is
    tested    whether a step of this run has shown that its code is fit for it
    logged    whether the log has said that the batch is not kept
    """

    mode: str = ""
    reason: str = ""
    advice: str = ""
    in_parts: bool = False
    tested: bool = False
    logged: bool = False

    @property
    def keeps_batch(self) -> bool:
        return self.mode == GLOBAL


def refused(reason: str, advice: str) -> BatchMode:
    return BatchMode(PER_WORKER, reason, advice)


@dataclass
class FirstStep:
    """What a rank has seen in a step.

    calls      for each of its batches, which of the operator's helpers were called, in this order
    direct     whether an optimizer has stepped without `self.step`
    scheduled  whether user code has stepped a registered scheduler
    changed    the attributes of the operator and the weights that `train_batch` has changed itself
    divided    whether all ranks know the samples of each other, because the data is divided by
               index
    sized      whether `train_batch` has read `self.world_size` before the backward pass
    together   whether `train_batch` has made collective calls of its own before the backward pass
    """

    calls: list[list[str]] = field(default_factory=list)
    direct: bool = False
    scheduled: bool = False
    changed: tuple[str, ...] = ()
    divided: bool = True
    sized: bool = False
    together: bool = False


def decide(seen: FirstStep) -> BatchMode:
    """Return the mode for code that has made this step."""
    if not seen.divided:
        return refused(
            "this kind of data is not divided by index",
            "register a DataLoader of a data set with __getitem__, or with a Ray Dataset or a ShardedStream pass "
            "ElasticConfig(batch='global')",
        )
    if seen.direct:
        return refused("train_batch calls optimizer.step() itself", LINES)
    if seen.scheduled:
        return refused("train_batch steps a scheduler", SCHEDULERS)
    unusual = next((calls for calls in seen.calls if calls != ONCE), None)
    if unusual is not None:
        done = ", ".join(f"self.{call}()" for call in unusual) or "none of the operator's helpers"
        return refused(f"train_batch calls {done}", LINES)
    if seen.together:
        return refused(
            "train_batch makes collective calls before the backward pass, so its loss may depend on the batch of all workers",
            NOT_HARMFUL,
        )
    if seen.sized:
        return refused(
            "train_batch reads self.world_size before the backward pass, so its loss may depend on it", NOT_HARMFUL
        )
    if seen.changed:
        names = ", ".join(f"self.{name}" for name in seen.changed[:3])
        return refused(f"train_batch changes {names}, which each piece would do", NOT_HARMFUL)
    return BatchMode(GLOBAL, in_parts=True)


def agreed(modes: Sequence[BatchMode]) -> BatchMode:
    """Return what all ranks follow: "per_worker" if one has a reason for it."""
    known = [each for each in modes if each.mode]
    reasons = [each for each in known if not each.keeps_batch]
    if reasons or not known:
        return refused(*reasons[0][1:3]) if reasons else BatchMode()
    return BatchMode(GLOBAL, in_parts=any(each.in_parts for each in known))


def notice(mode: BatchMode, workers: int, usual: int) -> str:
    """Return what the log says when `workers` of the `usual` number train, each with its batch."""
    train = "trains" if workers == 1 else "train"
    return (
        f"{counted(workers, 'worker')} of {usual} {train} now, and each keeps its batch size, so steps have another number of samples, and "
        f"the run will have other results than one without this change: {mode.reason}. To keep the batch of all workers, {mode.advice}; "
        "or pass ElasticConfig(batch='per_worker'), which says that this is meant"
    )

"""A replica whose weights are the list of its applied steps. It uses the library's position, sampling plan and feed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import SnapshotUpload
from raysgd.core.control import Control
from raysgd.core.decisions.sampling_plan import SamplingPlan
from raysgd.core.measures.average_meters import AverageMeterCollection
from raysgd.core.measures.metrics import Measured, for_all_ranks
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import DataLoaderFailure, Interrupted
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import CheckpointError
from raysgd.replica.loading import Refusal, take_over
from raysgd.replica.steps.asking import Asking, NoDriver
from raysgd.replica.steps.feed import Feed, MembershipChange, Source
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Drawn
from raysgd.replica.steps.step import Step as OptimizerStep
from tests.simulation.network import NetworkError

__all__ = ["GpuError", "SimReplica", "Step", "UserError", "steps_of", "value_of", "weights_after"]


class Step(NamedTuple):
    """One applied step: its epoch, the samples of all ranks together, as a range of the epoch's order, and the number of the
    engine's call that made it."""

    epoch: int
    start: int
    stop: int
    call: int


class UserError(Exception):
    """Raised by the simulated user's code. Each has a number of its own."""


class GpuError(UserError):
    """What a call raises when its GPU is broken."""


def value_of(sample: int) -> float:
    """Return the metric of one sample."""
    return float(sample * 37 % 101)


def weights_after(weights: int, epoch: int, start: int, stop: int) -> int:
    """Return the weights after a step on these samples, which depend on nothing else: each rank computes a part of the
    gradient, and the parts are summed."""
    return hash((weights, sum(gradient_of(epoch, sample) for sample in range(start, stop))))


def gradient_of(epoch: int, sample: int) -> int:
    return (epoch * 1009 + sample + 1) ** 3


def steps_of(state: bytes) -> list[Step]:
    """Return the steps that are applied in a state."""
    steps: list[Step] = pickle.loads(state)[1]
    return steps


class SimSource(Source):
    """A dataset of `total` samples, read in order. `draws` is called before each batch."""

    def __init__(self, total: int, batch_size: int, global_batch: int | None, draws: Callable[[], None]) -> None:
        self._total, self._batch_size, self._global, self._draws = total, batch_size, global_batch, draws
        self.loader = range(total)

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Every epoch has the same order."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        plan = self._plan(rank_info)
        for after, part in plan.parts_of(rank_info.world_rank, offset):
            before, offset = offset, after
            self._draws()
            yield Drawn((before, offset, part), offset, part.fresh, offset - before)

    def steps_left(self, rank_info: RankInfo, offset: int) -> int:
        return self._plan(rank_info).steps_left(offset)

    def _plan(self, rank_info: RankInfo) -> SamplingPlan:
        step = self._global or self._batch_size * rank_info.world_size
        ranks = rank_info.world_size
        return SamplingPlan(self._total, max(step, ranks), parts=ranks, world_size=ranks)


class SimReplica:
    """Implements `raysgd.core.protocols.Replica`, with effects in the same order as in `TorchReplica`."""

    saves_together = False

    def __init__(self, worker: Any, plan: Any, rank_info: RankInfo, control: Control) -> None:
        self._worker, self._plan, self._rank_info, self.control = worker, plan, rank_info, control
        self._position = Position()
        self._feed: Feed | None = None
        self._source = SimSource(plan.samples, plan.batch, plan.global_batch, lambda: worker.point("data"))
        self._mark = 0
        self.steps: list[Step] = []
        self.weights = self.initial = worker.number if rank_info.solo else 0  # a group begins with its first rank's
        self.undefined = False
        self._refuses = False  # the state that is being loaded
        self._meter, self._units_before = AverageMeterCollection(), 0

    @property
    def progress(self) -> Progress:
        phase = self.control.phase
        return Progress(phase=phase, loads=-1) if self.undefined else self._position.progress(phase)

    @property
    def loads(self) -> int:
        """Return how many checkpoints the user has loaded into this state; -1 if it is undefined."""
        return self.progress.loads

    def run(self, call: Call) -> Any:
        self.control.phase = call.name
        try:
            return call.method(self, **call.arguments)
        except DataLoaderFailure as failure:
            return failure.interrupted("train_loader", self.partial(), self.progress)
        finally:
            self.control.phase = "idle"

    # -- calls ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank_info.world_rank

    def train(
        self,
        call: int,
        num_steps: int | None,
        snapshot_first: bool = False,
        asks: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> Any:
        position = self._position
        done = not position.open_call(call)
        if done:
            self._snapshot()
            return Measured({"epoch": position.epoch}, position.call_units)
        self._meter, self._units_before = AverageMeterCollection(), position.call_units
        if snapshot_first:
            self._snapshot()
        self._feed = feed = Feed(
            self._source,
            position,
            self._rank_info,
            self.control,
            limit=num_steps,
            most=most,
            shared=True,
            asking=None if asks is None else Asking(self, type(self).save_within, **asks),
        )
        try:
            for step in feed:
                self._train_batch(step, *step.current.batch)
                self._commit(step)
            self._report(last=True)
        except MembershipChange:
            pass
        except BaseException:
            self._cut_short()
            raise
        if feed.stopped:
            asked = not self.control.interrupted
            return Interrupted(self.partial(), "stopped at a batch boundary", self.progress, asked=asked)
        self._feed = None
        position.call_done = True
        self._snapshot()
        return self.partial()

    def _train_batch(self, step: OptimizerStep, before: int, after: int, part: Any) -> None:
        worker = self._worker
        worker.compute()
        worker.point("forward")
        gradient = sum(gradient_of(self._position.epoch, each) for each in range(part.start, part.stop)) * part.fresh
        given = (len(self.steps), self.weights, self._position.epoch, before, after, part, gradient)
        group = worker.backend.group
        if group is None:
            raise NetworkError("the process group was aborted")
        contributions = group.collective(worker, given, worker.backend.collective_s)
        worker.point("reduced")
        self.weights = hash((self.weights, sum(each[6] for each in contributions)))
        self.steps.append(Step(self._position.epoch, before, after, self._position.call))
        self._position.applied += 1
        step.outcome = "applied"
        worker.checker.applied(worker, group, self.steps, contributions)
        worker.point("applied")
        size = part.stop - part.start
        mean = sum(value_of(sample) for sample in range(part.start, part.stop)) / max(size, 1)
        self._meter.update({"value": mean}, size * step.current.fresh)

    def validate(self, call: int) -> Any:
        for _ in range(3):
            if self.control.interrupted:
                return Interrupted(None, "a peer failed", self.progress)
            self._worker.compute()
            self._worker.point("validate")
        return {"rank": self._rank_info.world_rank, "steps": len(self.steps)}

    def checkpoint(self) -> Any:
        self._worker.compute()
        self._worker.point("save")
        return self._state() if self._rank_info.world_rank == 0 else None

    def save_within(self, transfer: str) -> None:
        """Copy the state between two batches, and give it to the driver; no call waits for that."""
        self._worker.compute()
        self._worker.point("save")
        if self.rank == 0:
            self._worker.checker.copies(self._worker, self.steps)
            try:
                self._worker.give_later(transfer, self._state())
            except ConnectionError as error:
                raise NoDriver(str(error)) from error

    def restore(self, data: Blob, loads: int, refuses: int = -1) -> Refusal | None:
        """Load a checkpoint on all ranks. If the rank `refuses` it, their state is undefined."""
        self._worker.compute()
        self._worker.point("restore")
        self._refuses = refuses >= 0 and refuses % self._rank_info.world_size == self._rank_info.world_rank
        replica: Any = self
        return take_over(replica, lambda: {"content": data.data}, loads)

    def notice_preemption(self, deadline_s: float | None) -> None:
        self._worker.checker.told_of_preemption(self._worker, deadline_s)
        self._worker.point("noticed")

    def apply(self, number: int) -> str:
        self._worker.compute()
        self._worker.point("function")
        self._worker.checker.called_function(self._worker, number)
        return str(self._worker.name)

    # -- state ----------------------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info
        self._worker.point("resized")
        self._cut_short()

    def partial(self) -> Measured:
        own = round(self._meter.num_samples)
        return Measured({"epoch": self._position.epoch, **self._meter.summary()}, self._position.call_units, own)

    def share(self) -> None:
        """Share nothing: it keeps no state of parts."""

    def state(self) -> memoryview:
        self._worker.point("state_dict")
        return memoryview(self._state())

    def share_state(self, giver: int, *, takes: bool, is_new: bool) -> None:
        if takes and is_new:  # it has a part of the other state until it has all
            self.steps, self.weights, self.undefined = [], -1, True
        content = self._worker.share(self.state, giver)
        if takes:
            self.load(content)

    def _state(self) -> bytes:
        state = (self._position.as_dict(), self.steps, self.weights, self.initial, self.undefined)
        return pickle.dumps(state)

    def load(self, data: Any) -> None:
        position, steps, *_ = pickle.loads(data)
        self._worker.checker.takes(self._worker, self.steps, self.loads, steps, position["loads"])
        self.steps, self.weights, self.undefined = [], -1, True
        self._worker.point("load_state_dict")
        self._take(data)

    def _take(self, data: Any) -> None:
        position, self.steps, self.weights, self.initial, self.undefined = pickle.loads(data)
        self._position.adopt(position)
        self._feed = None

    def check(self, state: dict[str, Any]) -> None:
        """All states fit."""

    def adopt(self, state: dict[str, Any]) -> None:
        self._take(state["content"])
        self.undefined = True
        self._worker.compute()
        self._worker.point("adopting")
        if self._refuses:
            raise CheckpointError("this rank refuses")

    def all_succeeded(self, here: bool) -> bool:
        group = self._worker.backend.group
        if group is None:
            raise NetworkError("the process group was aborted")
        return all(group.collective(self._worker, here, self._worker.backend.collective_s))

    def end_load(self, loads: int | None) -> None:
        self._worker.point("adopted")
        if loads is not None:
            self._position.call, self._position.call_done, self._position.loads = -1, False, loads
        self._snapshot()

    def unsaved(self) -> None:
        """Everything is in a checkpoint."""

    def close(self) -> None:
        self._worker.point("closing")

    def _cut_short(self) -> None:
        """End a loop after an error: commit what was applied."""
        feed, self._feed = self._feed, None
        if feed is not None and not feed.step.ended and feed.step.counts(failed=True):
            self._commit(feed.step, last=True)

    def _commit(self, step: OptimizerStep, last: bool = False) -> None:
        self._position.commit(step)
        self.control.batch = self._position.call_batches
        self._report(last)
        every = self._plan.snapshot_every
        if not last and isinstance(every, int) and self._position.step // every > self._mark:
            self._snapshot()
            self._mark = self._position.step // every

    def _report(self, last: bool = False) -> None:
        if self.control.due(last=last):
            self.control.report(self._position.progress("train"), self.partial())

    def sum_weights(self) -> str:
        """Return the weights in a number that a float holds."""
        return json.dumps({"weights": [float(self.weights % (1 << 31)), 1.0, 0.5]})

    def _snapshot(self) -> None:
        if self._rank_info.world_rank == 0 and self._plan.snapshot_every is not None:
            committed = self._position.call_units - self._units_before
            partial = self.partial()
            own = self._meter.num_samples
            everywhere = for_all_ranks(partial.metrics, self._rank_info.world_size, own, committed)
            partial = replace(partial, metrics=everywhere, drawn=committed)
            message = SnapshotUpload(self.progress, self._position.call, partial)
            self._worker.upload(message, self._state())

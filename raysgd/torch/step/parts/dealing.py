"""`ElasticConfig(shares="speed")`: how many parts of a batch each rank computes. Worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from raysgd.core.decisions.dealing import EVERY, MOST_DOUBLED, BySpeed, usual_seconds
from raysgd.core.ranks import RankInfo
from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.group.sharing import gathered_objects, summed

logger = logging.getLogger("raysgd")

DEALT = "the %d parts of a batch are dealt to ranks by their speed: %s. A part takes them %s s"


class OwnSeconds:
    """How long this rank takes for a part, from its data to the end of its backward pass, without
    the exchange of gradients, in which it waits for others. On a GPU, these are times of the
    device, which are read when it has got so far."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._computed: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._open: deque[tuple[list[tuple[Any, Any]], int]] = deque()
        self._seconds: deque[float] = deque(maxlen=EVERY << MOST_DOUBLED)

    def begin(self) -> None:
        """Note that this rank begins with a part. A step begins where the one before it has
        ended."""
        if self._began is None:
            self._began = self._now()

    def computed(self) -> None:
        """Note that a backward pass has ended, whose gradients have not been exchanged."""
        self._computed = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which this rank may wait for others within a part."""
        began = self._now()
        yield
        self._waits.append((began, self._now()))

    def forget(self) -> None:
        """Forget a step that does not count. This asks nothing of the device, which may have
        failed."""
        self._began, self._computed, self._waits = None, None, []

    def end(self, parts: int) -> None:
        """Note the end of a step that counts, of so many parts on this rank."""
        if self._began is not None and self._computed is not None:
            self._open.append(([(self._began, self._computed), *self._waits], parts))
        self._began, self._computed, self._waits = self._now(), None, []
        while self._open and (not self._on_gpu or self._open[0][0][0][1].query()):
            (span, *waits), count = self._open.popleft()
            self._seconds.append((self._between(*span) - sum(self._between(*each) for each in waits)) / count)

    def of_part(self, window: int) -> float:
        """Return how long a part has usually taken in the newest steps, 0 if there were none."""
        return usual_seconds(list(self._seconds)[-window:])

    def _now(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began)


class Dealer(Policy):
    """Deals the parts of a batch to the ranks, when a generation begins, and after some steps. All
    ranks are together then, and compute the same deal from what they have gathered, so it is part
    of no state. The numbers of a run do not depend on it."""

    def __init__(self, parts: int, internals: Any, device: torch.device) -> None:
        self._count = parts
        self._keep, self._states, self._registered = internals.keep_batch, internals.part_states, internals.registered
        self._device, self.seconds = device, OwnSeconds(device)
        internals.weigh.waiting = self.seconds.waiting
        self._feed: Feed | None = None
        if not internals.rank_info.solo:  # no rank of a first generation has anything
            self._deal(internals.rank_info, [None] * internals.rank_info.world_size)

    @classmethod
    def for_run(cls, run: Any) -> Dealer | None:
        return run.dealer if run.settings.in_parts else None

    def joined(self, rank_info: RankInfo) -> None:
        """Deal with the other ranks of a new generation."""
        if not rank_info.solo:
            self._deal(rank_info, gathered_objects(self.seconds.of_part(EVERY), self._registered.control))

    def _deal(self, rank_info: RankInfo, seconds: list[float | None]) -> None:
        """Deal, with what each rank has measured in earlier generations."""
        self._rank, self._policy = rank_info, BySpeed(self._count, seconds)
        self._keep.deal = self._policy.deal

    def begin_loop(self, feed: Feed) -> None:
        self._feed = feed if isinstance(feed.source, PlannedSource) else None  # not one of a call's own data set

    def begin_part(self, step: Step) -> None:
        self.seconds.begin()

    def on_backward(self, step: Step, loss: Any) -> Any:
        if loss.requires_grad:
            loss.register_hook(lambda _: run_after_backward(self.seconds.computed))  # before DDP waits in the same way
        return loss

    def end_step(self, step: Step) -> None:
        counts = step.outcome != "undone" and not step.failed
        if counts and step.outcome != "skipped":
            self.seconds.end(len(step.drawn))
        else:
            self.seconds.forget()
        if not counts or self._feed is None or not self._policy.due():
            return
        seconds = self.seconds.of_part(self._policy.window)
        mine = [seconds if rank == self._rank.world_rank else 0.0 for rank in range(self._rank.world_size)]
        every = summed(mine, self._device, self._registered.control)
        if self._policy.change(every):
            self._states.share()  # a rank may get a part whose state another one has
            self._keep.deal = self._policy.deal
            self._feed.reopen()
            if self._rank.world_rank == 0:
                logger.warning(DEALT, self._count, self._policy.deal, ", ".join(f"{each:.3g}" for each in every))

    def reset(self) -> None:
        self.seconds.forget()
        self._feed = None

"""Decide from what each rank needs for a batch which ranks the others wait for, and why. Pure.
Both.

In a synchronous group all ranks need equally long for a step, and the slow one waits least.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from raysgd.errors import ranked

# A verdict is about the newest windows: 30 s or 100 batches at least, and in any case 10 s and 30 batches.
WINDOWS, WINDOW_S, WINDOW_BATCHES, LEAST_S, LEAST_BATCHES = 10, 3.0, 10, 1.0, 3
# With GPUs, where DDP measures one step of 97, so many batches are in a window, so that two measured ones are in all of them.
GPU_BATCHES = 20
# After so many windows without a verdict, one is logged again.
FORGOTTEN = 100
# Of each second: for how long the others wait for a rank that is slow, and all ranks for data. Half of it in each window: one long pause is
# no verdict, nor are a few long steps.
HELD_UP, NO_DATA = 0.2, 0.3
FASTER = "let processes read it (num_workers=4, persistent_workers=True; for GPUs pin_memory=True, and TrainingOptions(read_ahead=True))"


class Sums(NamedTuple):
    """What one worker's loops of `train` have taken since it joined its generation, in seconds.

    batches, parts  how many of each
    data     it waited for batches
    hidden   of these, while gradients were exchanged
    wait     it waited for the other ranks' gradients; None if that is not known
    queued   its training thread could have run, and had no processor
    loader   the settings of the loader
    """

    batches: int = 0
    parts: int = 0
    seconds: float = 0.0
    data: float = 0.0
    hidden: float = 0.0
    wait: float | None = 0.0
    queued: float = 0.0
    loader: str = ""


@dataclass(frozen=True)
class RankSpeed:
    """What one rank needs for a batch: means over the newest batches, in seconds.

    rank, node, gpus  where it is, with the numbers of its GPUs
    parts            how many parts of a batch it computes
    batch_seconds    all of the following
    data_seconds     it waits for data
    compute_seconds  all else; with the wait for other ranks where that is not known
    wait_seconds     it waits for other ranks; None if that is not known
    hidden_seconds   of those for data, while gradients are exchanged (not known on GPUs)
    queued_seconds   of all, those in which it could compute and has no processor (Linux)
    loader           the settings of its data loader
    """

    rank: int
    node: str = ""
    gpus: tuple[str, ...] = ()
    parts: float = 1.0
    batch_seconds: float = 0.0
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    wait_seconds: float | None = 0.0
    hidden_seconds: float = 0.0
    queued_seconds: float = 0.0
    loader: str = ""


@dataclass(frozen=True)
class Speed:
    """How fast the ranks are, since the last change of the workers.

    ranks    each one's numbers, over the newest 30 s or 100 batches, or more
    slow     the ranks for which the others wait more than 0.2 s of each second of these; all ranks,
             if they wait more than 0.3 s for data
    phase    what they are slow in: "data", "computing", or "host", if they have no processor, or
             are all ranks of a machine
    waiting  for how many seconds of each second the others wait for them, or all for data
    text     the same in words, as in the log; empty if no rank is slow
    """

    ranks: tuple[RankSpeed, ...] = ()
    slow: tuple[int, ...] = ()
    phase: Literal["", "data", "computing", "host"] = ""
    waiting: float = 0.0
    text: str = ""


class SpeedWatch:
    """Owns the newest sums of each rank, those at the ends of the newest windows, and what was
    logged."""

    def __init__(self) -> None:
        self.changed()

    def changed(self) -> None:
        """Begin again, because the workers have changed."""
        self._places: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._sums: dict[int, Sums] = {}
        self._ends: deque[Mapping[int, Sums]] = deque([{}], maxlen=WINDOWS + 1)
        self._complete: set[int] = set()  # the ranks that have reached the end of the window
        self._speed, self._logged, self._healthy = Speed(), set[tuple[tuple[int, ...], str]](), 0

    def see(self, rank: int, ranks: int, sums: Sums, *, node: str = "", gpus: Sequence[str] = ()) -> str:
        """Note what one of the `ranks` has measured. Return a line for the log if it shows
        something new."""
        if rank >= ranks:
            return ""  # a late message of a worker that has failed
        if sums.batches < self._sums.get(rank, sums).batches:
            self.changed()
        self._sums[rank], self._places[rank] = sums, (node, tuple(gpus))
        began = self._ends[-1].get(rank, Sums())
        if _is_window(sums.batches - began.batches, sums.seconds - began.seconds, on_gpus=bool(gpus)):
            self._complete.add(rank)
        if len(self._complete) < ranks:
            return ""
        self._complete.clear()
        self._ends.append(dict(self._sums))
        self._speed = self._verdict()
        self._healthy = 0 if self._speed.text else self._healthy + 1
        if self._healthy == FORGOTTEN:
            self._logged.clear()
        key = self._speed.slow, self._speed.phase
        new = self._speed.text if key not in self._logged else ""
        self._logged.add(key)
        return new

    def now(self) -> Speed:
        return replace(self._speed, ranks=self._between(self._ends[0], dict(self._sums)))

    def _verdict(self) -> Speed:
        windows = [self._between(before, after) for before, after in pairwise(self._ends)]
        if len(windows) < WINDOWS:
            return Speed()
        every = self._between(self._ends[0], self._ends[-1])
        if late := late_ranks(every, HELD_UP).intersection(*(late_ranks(each, HELD_UP / 2) for each in windows)):
            return slow_ranks(every, late)
        waits = without_data(every) > NO_DATA and min(map(without_data, windows)) > NO_DATA / 2
        return no_data(every) if waits else Speed()

    def _between(self, before: Mapping[int, Sums], after: Mapping[int, Sums]) -> tuple[RankSpeed, ...]:
        return tuple(
            _speed(rank, self._places[rank], before.get(rank, Sums()), after[rank])
            for rank in sorted(after)
            if after[rank].batches > before.get(rank, Sums()).batches
        )


def _is_window(batches: int, seconds: float, *, on_gpus: bool) -> bool:
    enough = batches >= GPU_BATCHES if on_gpus else batches >= WINDOW_BATCHES or seconds >= WINDOW_S
    return enough and batches >= LEAST_BATCHES and seconds >= LEAST_S


def _speed(rank: int, place: tuple[str, tuple[str, ...]], before: Sums, after: Sums) -> RankSpeed:
    batches = after.batches - before.batches
    whole, data = (after.seconds - before.seconds) / batches, (after.data - before.data) / batches
    wait = None if after.wait is None else (after.wait - (before.wait or 0.0)) / batches
    return RankSpeed(
        rank,
        *place,
        parts=(after.parts - before.parts) / batches,
        batch_seconds=whole,
        data_seconds=data,
        compute_seconds=max(whole - data - (wait or 0.0), 0.0),
        wait_seconds=wait,
        hidden_seconds=(after.hidden - before.hidden) / batches,
        queued_seconds=(after.queued - before.queued) / batches,
        loader=after.loader,
    )


def _own(ranks: Sequence[RankSpeed]) -> list[float]:
    """Return the seconds of a batch in which each rank does not wait for others; if that is not
    known, those in which it waits for data."""
    if any(each.wait_seconds is None for each in ranks):
        return [each.data_seconds - each.hidden_seconds for each in ranks]
    return [each.data_seconds + each.compute_seconds for each in ranks]


def _too_long(ranks: Sequence[RankSpeed]) -> list[float]:
    """Return by how many seconds of each second a rank needs longer for a batch than one of usual
    speed with the most parts would: for that one, the others wait in any case."""
    seconds = _own(ranks)
    usual = statistics.median_low([took / each.parts for took, each in zip(seconds, ranks, strict=True)])
    longest, step = usual * max(each.parts for each in ranks), statistics.median(each.batch_seconds for each in ranks)
    return [(took - longest) / step for took in seconds]


def late_ranks(ranks: Sequence[RankSpeed], limit: float) -> set[int]:
    """Return the ranks for which the others wait longer: at most half of all. On GPUs, reading is
    hidden by computing, so it shows only in the waits of others."""
    if any(each.gpus and each.wait_seconds is None for each in ranks):
        return set()
    return {each.rank for each, late in zip(ranks, _too_long(ranks), strict=True) if late > limit}


def without_data(ranks: Sequence[RankSpeed]) -> float:
    """Return for how much of each second the rank that waits least for others waits for data, and
    nothing hides that; 0 if another one hardly waits for data, and on GPUs, where it is not known
    what is hidden."""
    if any(each.gpus or each.data_seconds < NO_DATA / 2 * each.batch_seconds for each in ranks):
        return 0.0
    last = min(ranks, key=lambda each: each.wait_seconds or 0.0)
    return (last.data_seconds - last.hidden_seconds) / last.batch_seconds


def slow_ranks(ranks: Sequence[RankSpeed], late: Collection[int]) -> Speed:
    """Return the verdict on the `late` ranks: with the seconds of the slowest one, and the medians
    of the others."""
    slow, others = [each for each in ranks if each.rank in late], [each for each in ranks if each.rank not in late]
    waiting, worst = max(zip(_too_long(ranks), ranks, strict=True), key=lambda pair: (pair[1].rank in late, pair[0]))

    def shares(name: str) -> tuple[float, float]:
        share, *usual = (getattr(each, name) / each.batch_seconds for each in (worst, *others))
        return share, statistics.median(usual)

    data, queued = shares("data_seconds"), shares("queued_seconds")
    nodes = {each.node for each in slow}
    phase: Literal["data", "computing", "host"] = "computing"
    fact = "{:.3g} s for a batch, and the others {:.3g} s".format(*map(statistics.median, (_own(slow), _own(others))))
    remedy = (
        "Look there for a slower or throttled processor or GPU, more rows in a batch, and code that only this rank runs"
    )
    if queued[0] - queued[1] >= waiting / 2:
        phase, fact = "host", "{:.1f} s of each second without a processor, and the others {:.1f} s".format(*queued)
        remedy = "Other processes use the processors there: end them, or reserve more CPUs for each worker"
    elif data[0] - data[1] >= waiting / 2:
        phase, fact = "data", "{:.1f} s of each second without data, and the others {:.1f} s".format(*data)
        remedy = f"Look at the disk and the network there, and at the loader ({worst.loader}): {FASTER}"
    elif len(slow) > len(nodes) == 1 and nodes.isdisjoint(each.node for each in others):
        phase, remedy = "host", "These are all ranks there: look at what they share, such as processors or power"
    gpus = f", GPU {', '.join(worst.gpus)}" if worst.gpus and len(slow) == 1 else ""
    where, cost = f"{ranked(sorted(late))} on {', '.join(sorted(nodes))}{gpus}", f"{waiting:.1f} s of each second"
    text = f"{where}: {fact}. The others wait {cost} for that. {remedy}"
    return Speed(slow=tuple(sorted(late)), phase=phase, waiting=waiting, text=text)


def no_data(ranks: Sequence[RankSpeed]) -> Speed:
    """Return the verdict that all ranks wait for data."""
    waiting, who = without_data(ranks), "all ranks wait" if ranks[1:] else "training waits"
    text = (
        f"{who} for data for {waiting:.1f} s of each second, in which nothing is trained. Look at the loader "
        f"({ranks[0].loader}): {FASTER}, or make a sample cheaper to read"
    )
    return Speed(slow=tuple(each.rank for each in ranks), phase="data", waiting=waiting, text=text)

"""Which rank the others wait for, and why: from simulated steps of a synchronous group."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from raysgd.core.measures.speed import FORGOTTEN, Speed, SpeedWatch, Sums


@dataclass
class Rank:
    """What one rank needs for a step, in seconds, and where it is."""

    data: float = 0.01
    compute: float = 0.19
    queued: float = 0.0
    parts: int = 1
    hidden: float = 0.0  # of the data
    pause: float = 0.0  # of every 150th step
    noise: float = 0.05
    node: str = "a"
    gpus: tuple[str, ...] = ()


class Group:
    """Ranks that exchange gradients in `exchange_s` when the last one has arrived, and the lines in the log."""

    def __init__(self, ranks: Sequence[Rank], *, exchange_s: float = 0.01, known: bool = True, seed: int = 0) -> None:
        self.ranks, self.exchange_s, self.known, self.random = list(ranks), exchange_s, known, random.Random(seed)
        self.sums, self.watch, self.lines = [Sums(loader="num_workers=2") for _ in ranks], SpeedWatch(), list[str]()
        self.steps = 0

    def train(self, seconds: float, *, steps: int = 300) -> Speed:
        """Train for so long, and at least so many steps. Each rank reports about once in a second."""
        end, least = self.sums[0].seconds + seconds, self.steps + steps
        while self.sums[0].seconds < end or self.steps < least:
            self._step()
        return self.watch.now()

    def _step(self) -> None:
        self.steps += 1
        took = []
        for rank in self.ranks:
            noise = self.random.lognormvariate(0.0, rank.noise) * rank.parts
            pause = rank.pause if self.steps % 150 == 0 else 0.0
            took.append((rank.data * noise, rank.compute * noise + pause, rank.queued * noise))
        step = max(map(sum, took)) + self.exchange_s
        for number, (rank, (data, compute, queued)) in enumerate(zip(self.ranks, took, strict=True)):
            before = self.sums[number]
            wait = None if before.wait is None or not self.known else before.wait + step - data - compute - queued
            self.sums[number] = after = Sums(
                self.steps,
                before.parts + rank.parts,
                before.seconds + step,
                before.data + data,
                before.hidden + min(rank.hidden, data),
                wait,
                before.queued + queued,
                before.loader,
            )
            if (after.seconds + number / 8) % 1.0 < step:
                line = self.watch.see(number, len(self.ranks), after, node=rank.node, gpus=rank.gpus)
                self.lines += [line] if line else []


def ranks(count: int, **slow: Any) -> list[Rank]:
    """Return ranks on two machines, with the fields of the slow ones: `r1=Rank(compute=0.4)`."""
    found = [Rank(node="ab"[2 * rank // count]) for rank in range(count)]
    for name, rank in slow.items():
        found[int(name[1:])] = replace(rank, node=found[int(name[1:])].node)
    return found


DATA, HALF, FEW = Rank(data=0.3), Rank(compute=0.38), Rank(queued=0.2)
CAUSES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "one rank reads slowly": (Group(ranks(2, r1=DATA)), (1,), "data"),
    "a slow disk of one machine": (Group(ranks(4, r2=DATA, r3=DATA)), (2, 3), "data"),
    "one rank reads slowly, with FSDP": (Group(ranks(4, r2=DATA), known=False), (2,), "data"),
    "one rank computes slowly": (Group(ranks(2, r0=HALF)), (0,), "computing"),
    "a throttled GPU of eight": (Group(ranks(8, r6=replace(HALF, gpus=("2",)))), (6,), "computing"),
    "twice the rows on one rank": (Group(ranks(3, r1=Rank(data=0.02, compute=0.38))), (1,), "computing"),
    "rank 0 writes a file in each step": (Group(ranks(4, r0=Rank(compute=0.29))), (0,), "computing"),
    "one of two ranks with two parts": (
        Group(ranks(3, r0=Rank(parts=2), r1=replace(HALF, parts=2))),
        (1,),
        "computing",
    ),
    "a process beside one worker": (Group(ranks(2, r1=FEW)), (1,), "host"),
    "half of a processor for one of four": (Group(ranks(4, r3=replace(FEW, noise=0.3))), (3,), "host"),
    "a slower machine": (Group(ranks(4, r2=HALF, r3=HALF)), (2, 3), "host"),
    "all ranks read slowly": (Group([Rank(data=0.2) for _ in range(4)]), (0, 1, 2, 3), "data"),
    "the only worker reads slowly": (Group([Rank(data=0.2)]), (0,), "data"),
    "long steps": (Group(ranks(2, r1=Rank(compute=6.0), r0=Rank(compute=3.0))), (1,), "computing"),
}


@pytest.mark.parametrize(("step", "batches"), [(0.01, 500), (0.1, 100), (0.2, 100), (1.0, 30), (4.0, 30)])
def test_a_verdict_needs_30_s_or_100_batches(step: float, batches: int) -> None:
    group = Group([Rank(compute=step / 2), Rank(compute=step)], exchange_s=0.0)
    while not group.lines:
        group.train(0.0, steps=1)
    assert batches <= group.steps < 2 * batches, "each rank reports once in a second"


def test_with_gpus_a_verdict_needs_two_steps_that_ddp_has_measured() -> None:
    group = Group([Rank(gpus=("0",)), Rank(compute=2.0, gpus=("1",))], exchange_s=0.0)
    while not group.lines:
        group.train(0.0, steps=1)
    assert group.steps == pytest.approx(200, abs=10)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(cause: str) -> None:
    group, slow, phase = CAUSES[cause]
    found = group.train(120)
    assert (found.slow, found.phase) == (slow, phase), found
    assert len(group.lines) == 1 and 0.2 < found.waiting < 1


def test_the_line_says_where_what_it_costs_and_what_to_do() -> None:
    group = Group([Rank(noise=0.0), replace(HALF, gpus=("2",), noise=0.0)], exchange_s=0.0)
    found = group.train(60)
    assert found.waiting == pytest.approx(0.5, abs=0.02), "0.39 s instead of 0.2 s"
    assert group.lines == [
        "rank 1 on a, GPU 2: 0.39 s for a batch, and the others 0.2 s. The others wait 0.5 s of each second for that. Look there for a "
        "slower or throttled processor or GPU, more rows in a batch, and code that only this rank runs"
    ]
    assert [round(each.compute_seconds, 2) for each in found.ranks] == [0.19, 0.38]
    assert [round(each.wait_seconds or 0.0, 2) for each in found.ranks] == [0.19, 0.0]


def test_it_is_said_again_only_when_it_changes() -> None:
    group = Group(ranks(4, r1=HALF))
    group.train(300)
    assert len(group.lines) == 1
    group.ranks[1] = Rank()
    assert group.train(60).slow == () and len(group.lines) == 1
    group.ranks[1] = HALF
    assert group.train(60).slow == (1,) and len(group.lines) == 1, "that was said"
    group.ranks[1] = DATA
    assert group.train(60).phase == "data" and len(group.lines) == 2
    group.ranks[1] = Rank()
    group.train(10 * FORGOTTEN + 30)
    group.ranks[1] = HALF
    assert group.train(60).slow == (1,) and len(group.lines) == 3, "long ago"
    group.watch.changed()
    group.sums, group.steps = [Sums() for _ in group.ranks], 0
    assert group.watch.now() == Speed()
    group.train(90)
    assert len(group.lines) == 4, "the workers have changed"


HEALTHY: dict[str, Callable[[], Group]] = {
    "one rank has the parts of two": lambda: Group(ranks(3, r1=Rank(parts=2))),
    "one rank is slow, and has fewer parts": lambda: Group(ranks(2, r0=Rank(parts=3), r1=Rank(compute=0.5))),
    "the exchange takes most of the time": lambda: Group(ranks(4), exchange_s=1.0),
    "all read while the device computes": lambda: Group([Rank(data=0.2, hidden=0.2)] * 4),
    "rank 0 waits for a checkpoint now and then": lambda: Group(ranks(4, r0=Rank(pause=8.0))),
    "data that GPUs may not wait for": lambda: Group([Rank(data=0.2, gpus=("0",))] * 2),
    "one of two slow ranks would be missed by none": lambda: Group(ranks(2, r1=Rank(compute=0.22))),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_nothing_is_said(case: str) -> None:
    group = HEALTHY[case]()
    assert group.train(300).slow == () and group.lines == []


def test_a_rank_that_is_slow_every_other_20_seconds_is_not_named() -> None:
    group = Group(ranks(2))
    for _ in range(10):
        group.ranks[0] = HALF if group.ranks[0] is not HALF else Rank()
        group.train(20, steps=50)
    assert group.lines == []


def healthy(seed: int) -> Group:
    """Return a group whose steps have a random length and noise, and whose ranks differ by at most 10 %."""
    chance = random.Random(seed)
    step, noise, data = chance.choice([0.05, 0.2, 1.0, 4.0]), chance.uniform(0.0, 0.5), chance.uniform(0.0, 0.2)
    found = []
    for rank in range(chance.choice([1, 2, 2, 3, 4, 8])):
        own, pause = step * chance.uniform(1.0, 1.1), chance.choice([0.0, 0.0, 2.0, 5 * step]) if rank == 0 else 0.0
        found.append(Rank(own * data, own * (1 - data), pause=pause, noise=noise, node="ab"[rank % 2]))
    return Group(found, exchange_s=step * chance.uniform(0.0, 0.5), seed=seed)


@pytest.mark.parametrize("seed", range(50))
def test_healthy_runs_have_no_line(seed: int) -> None:
    group = healthy(seed)
    group.train(300, steps=600)
    assert group.lines == []

"""Runs of machines with other speeds, in which `raysgd.core.decisions.dealing` deals the parts.

python -m tests.core.dealing_runs 10000     prints how soon and how well, for each kind of run
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import numpy

from raysgd.core.decisions.dealing import BySpeed, dealt, longest, usual_seconds

STEPS = 3000
BEST = cache(dealt)
Speed = Callable[[int, float], float]  # a rank's seconds for a part, in a step that begins at this time


@dataclass
class Run:
    """What one run has shown. `late` is the step from which the deal was within one part of the best one, and `turn` the one from
    which the speeds stay as they are."""

    kind: str
    turn: int
    changes: list[int] = field(default_factory=list)
    late: int = 0
    seconds: float = 0.0
    equal: float = 0.0
    best: float = 0.0


def speeds_of(kind: str, base: list[float], turn: int, draw: random.Random) -> Speed:
    """Return how fast each rank is. One of them differs."""
    rank, factor = draw.randrange(len(base)), draw.uniform(1.5, 4.0)

    def speed(at: int, step: int, now: float) -> float:
        slow = {"slow": True, "recovers": step < turn, "throttled": step >= turn, "alternates": int(now / 20) % 2}
        return base[at] * (factor if at == rank and slow.get(kind) else 1.0)

    return speed  # type: ignore[return-value]


def run(seed: int) -> Run:
    draw = random.Random(seed)
    kind = draw.choice(["equal", "slow", "recovers", "throttled", "alternates"])
    ranks = draw.randint(2, 6)
    parts = ranks * draw.randint(2, 8)
    alike = kind != "slow" or draw.random() < 0.5
    base = [0.02 if alike else draw.uniform(0.01, 0.05) for _ in range(ranks)]
    noise, turn = draw.uniform(0.0, 0.2), draw.randrange(500, 1000)
    speed = speeds_of(kind, base, turn, draw)
    begins = [draw.uniform(0.01, 0.05) for _ in range(ranks)] if draw.random() < 0.5 else [None] * ranks
    policy, shown = BySpeed(parts, begins), Run(kind, turn)
    every: list[list[float]] = [[] for _ in range(ranks)]
    noises = numpy.random.default_rng(seed).lognormal(0.0, noise, (STEPS, ranks)).tolist()
    equal = dealt(parts, [1.0] * ranks)
    for step in range(STEPS):
        true = [speed(rank, step, shown.seconds) for rank in range(ranks)]
        for rank in range(ranks):
            every[rank].append(true[rank] * noises[step][rank])
        shown.seconds += longest(policy.deal, true)
        shown.equal += longest(equal, true)
        best = BEST(parts, tuple(true))
        shown.best += longest(best, true)
        if max(abs(one - other) for one, other in zip(policy.deal, best, strict=True)) > 1:
            shown.late = step + 1
        if policy.due() and policy.change([usual_seconds(each[-policy.window :]) for each in every]):
            shown.changes.append(step + 1)
            assert sum(policy.deal) == parts and min(policy.deal) >= 1
    return shown


def main(count: int) -> None:
    runs = [run(seed) for seed in range(count)]
    print(
        f"{'kind':<12}{'runs':>6}{'changes':>9}{'most':>6}{'late':>7}{'latest':>8}{'of best':>9}{'of equal':>10}{'most':>7}"
    )
    for kind in sorted({each.kind for each in runs}):
        own = [each for each in runs if each.kind == kind]
        changes, late = [len(each.changes) for each in own], sorted(each.late for each in own)
        print(
            f"{kind:<12}{len(own):>6}{sum(changes) / len(own):>9.2f}{max(changes):>6}{late[len(own) // 2]:>7}{late[-1]:>8}"
            f"{median(each.seconds / each.best for each in own):>9.3f}{median(each.seconds / each.equal for each in own):>10.3f}"
            f"{max(each.seconds / each.equal for each in own):>7.3f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)

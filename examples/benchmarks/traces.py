"""When each process took its steps: a file per process, and what can be read from all of them together.

The clock is the machine's monotonic one, which all its processes share.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, order=True)
class Step:
    """One optimizer step of one process."""

    at: float
    process: int
    rank: int
    epoch: int


class StepTrace:
    """Appends a line for each step; unbuffered, so that a killed process leaves all it did."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(Path(folder) / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, rank: int, epoch: int) -> None:
        os.write(self._file, f"{time.monotonic():.6f} {os.getpid()} {rank} {epoch}\n".encode())


def read(folder: str | Path) -> list[Step]:
    """All steps of all processes, in the order in which they happened."""
    steps = []
    for path in Path(folder).glob("*.steps"):
        for line in path.read_text(encoding="utf-8").splitlines():
            at, process, rank, epoch = line.split()
            steps.append(Step(float(at), int(process), int(rank), int(epoch)))
    return sorted(steps)


def wait_for_steps(
    folder: str | Path, *, rank: int, epoch: int, count: int, limit_s: float, runs: Callable[[], bool]
) -> Step:
    """Blocks until this rank has done so many steps of this epoch; its latest step."""
    deadline = time.monotonic() + limit_s
    while runs() and time.monotonic() < deadline:
        own = [step for step in read(folder) if (step.rank, step.epoch) == (rank, epoch)]
        if len(own) >= count:
            return own[-1]
        time.sleep(0.02)
    raise TimeoutError(
        f"rank {rank} did not do {count} steps of epoch {epoch} within {limit_s:g} s, or ended before; "
        "set BENCHMARK_DEBUG=1 to see its messages"
    )


def longest_gap(steps: Sequence[Step], *, within_epochs: bool = False) -> float:
    """The longest time between two neighbours; 0 for fewer than two. `within_epochs`: not over an epoch's
    border, where the script itself has things to do."""
    return max((b.at - a.at for a, b in pairwise(steps) if a.epoch == b.epoch or not within_epochs), default=0.0)

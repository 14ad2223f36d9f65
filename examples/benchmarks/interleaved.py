"""Rounds in which all contenders train in turn, and what their processes used meanwhile."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contenders import Contender


@dataclass(frozen=True)
class Turn:
    """The mean epoch of one contender in one round: seconds, and processor seconds of each of its workers."""

    wall: float
    busy: float


def interleaved(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Turn]]:
    """For each contender, its turns: one in each round."""
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    processes = {contender.name: contender.processes() for contender in contenders}
    for number in range(rounds):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        spent: dict[str, list[Turn]] = {name: [] for name in turns}
        for contender in [*order, *reversed(order)]:
            spent[contender.name].append(one_epoch(contender, processes[contender.name]))
        for name, (first, second) in spent.items():
            turns[name].append(Turn((first.wall + second.wall) / 2, (first.busy + second.busy) / 2))
        told = ", ".join(f"{name} {own[-1].wall:.3f} s ({own[-1].busy:.3f} busy)" for name, own in turns.items())
        print(f"round {number + 1}: {told}", file=sys.stderr)
    return turns


def one_epoch(contender: Contender, processes: Sequence[int]) -> Turn:
    started, busy = time.perf_counter(), processor_seconds(processes)
    contender.epoch()
    wall = time.perf_counter() - started
    return Turn(wall, (processor_seconds(processes) - busy) / len(processes))


def processor_seconds(processes: Sequence[int]) -> float:
    """What these processes have used of the processors so far; NaN where /proc does not tell."""
    ticks = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return math.nan
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_mb(processes: Sequence[int]) -> float | None:
    """The most memory that one of these processes ever held (what `ru_maxrss` is there), their mean, in MB."""
    peaks = []
    for process in processes:
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        peaks += [int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM")]
    return round(sum(peaks) / len(peaks), 1) if peaks else None

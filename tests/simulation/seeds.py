"""Run many seeds: `python -m tests.simulation --seeds 2000`.

`--seed 17` runs one, and prints all that happens. A seed that fails prints its plan, shortened.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.plan import KINDS, PHASES, PLANS
from tests.simulation.scenario import run
from tests.simulation.shrink import shrink

__all__ = ["Summary", "main", "simulate"]

CHUNK = 50


@dataclass
class Summary:
    """The results of several seeds. Summaries can be added. `cpu_s` is processor time, `slowest_s` the longest that a
    call took in virtual time after the last fault. `faults` counts each kind in each phase of the driver."""

    seeds: int = 0
    steps: int = 0
    redone: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        slowest_s = max(self.slowest_s, other.slowest_s)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.slowest_s = slowest_s

    def __str__(self) -> str:
        recoveries = ", ".join(f"{count} {each}" for each, count in self.recoveries.most_common())
        return "\n".join(
            [
                f"{self.seeds} seeds, {self.cpu_s:.1f} s of processor time, {len(self.failed)} failed",
                f"  {self.steps} steps, {self.redone} of them redone; a call ended at most {self.slowest_s:.0f} s (virtual) after the last "
                "fault",
                f"  {self.recoveries.total()} recoveries: {recoveries}",
                f"  {self.faults.total()} faults, by kind and by what the driver did:",
                *self.coverage(),
            ]
        )

    def coverage(self) -> list[str]:
        """Return a table: how often each kind of fault was injected in each phase of the driver."""
        rows = [["", *PHASES, "all"]]
        for kind in KINDS:
            counts = [self.faults[f"{kind} in {phase}"] for phase in PHASES]
            rows.append([kind, *(str(count or "-") for count in counts), str(sum(counts))])
        sums = [sum(self.faults[f"{kind} in {phase}"] for kind in KINDS) for phase in PHASES]
        rows.append(["all", *map(str, sums), str(sum(sums))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  " + " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def simulate(first: int, count: int, *, tracing: bool = False, kind: str = "") -> Summary:
    """Run the seeds from `first` on, of a kind in PLANS."""
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.DEBUG if tracing else logging.CRITICAL)
    began, summary = time.process_time(), Summary()
    try:
        for seed in range(first, first + count):
            result = run(PLANS[kind](seed), tracing=tracing)
            faults = Counter({f"{fault} in {phase}": count for (fault, phase), count in result.struck.items()})
            recovered = Counter(each.reason for each in result.recoveries)
            summary.add(Summary(1, result.steps, result.redone, 0.0, result.slowest_s, faults, recovered, []))
            if tracing:
                print(result.plan, *result.trace, sep="\n")
            if result.error is not None:
                summary.failed.append(f"seed {seed}: {describe(result.error)}")
                if tracing:
                    traceback.print_exception(result.error)
    finally:
        logger.setLevel(level)
    summary.cpu_s = time.process_time() - began
    return summary


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"


def _simulate(chunk: tuple[int, int, str]) -> Summary:
    return simulate(*chunk[:2], kind=chunk[2])


def _shortened(failure: str, kind: str) -> str:
    """Return a failure with its shortened plan."""
    seed = int(failure.split()[1].rstrip(":"))
    logging.getLogger("raysgd").setLevel(logging.CRITICAL)
    plan = shrink(PLANS[kind](seed))
    return f"{failure}\n  shortened: {plan!r}\n  gives: {describe(run(plan).error or AssertionError('nothing'))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, with all that happens in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many share the work")
    about = "of trainers with a name, whose scripts end and are started again"
    parser.add_argument("--named", action="store_const", const="named", default="", dest="kind", help=about)
    options = parser.parse_args()
    if options.seed is not None:
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        total = simulate(options.seed, 1, tracing=True, kind=options.kind)
    else:
        total = _simulate_all(options)
    print(total)
    for failure in total.failed[:5]:
        print(_shortened(failure, options.kind), flush=True)
    return bool(total.failed)


def _simulate_all(options: argparse.Namespace) -> Summary:
    """Run the seeds in several processes, and print those that fail."""
    total, end = Summary(), options.first + options.seeds
    chunks = [(start, min(CHUNK, end - start), options.kind) for start in range(options.first, end, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for summary in pool.imap(_simulate, chunks):
            total.add(summary)
            for failure in summary.failed:
                print(failure, flush=True)
    return total

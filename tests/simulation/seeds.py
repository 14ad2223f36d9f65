"""Run many seeds: `python -m tests.simulation --seeds 2000`. Repeat one that fails with `--first SEED --seeds 1
--trace`."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.scenario import run

__all__ = ["Summary", "main", "simulate"]

CHUNK = 50


@dataclass
class Summary:
    """The results of several seeds. Summaries can be added."""

    seeds: int = 0
    steps: int = 0
    redone: int = 0
    user_errors: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def simulate(first: int, count: int, *, tracing: bool = False) -> Summary:
    """Run the seeds from `first` on."""
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.DEBUG if tracing else logging.CRITICAL)
    try:
        return _simulated(range(first, first + count), tracing=tracing)
    finally:
        logger.setLevel(level)


def _simulated(seeds: range, *, tracing: bool) -> Summary:
    summary = Summary()
    for seed in seeds:
        result, world, error = run(seed, tracing=tracing)
        recovered = Counter(each.reason for each in result.recoveries)
        summary.add(Summary(1, result.steps, result.redone, result.user_errors, result.struck, recovered))
        if tracing:
            print(result.plan, *world.trace, sep="\n")
        if error is not None:
            summary.failed.append(f"seed {seed}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}")
            if tracing:
                traceback.print_exception(error)
    return summary


def _simulate(chunk: tuple[int, int]) -> Summary:
    return simulate(*chunk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many processes share the work")
    parser.add_argument("--trace", action="store_true", help="print all that happens, in one process")
    options = parser.parse_args()
    began, end, total = time.monotonic(), options.first + options.seeds, Summary()
    if options.trace:
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        total = simulate(options.first, options.seeds, tracing=True)
    else:
        chunks = [(first, min(CHUNK, end - first)) for first in range(options.first, end, CHUNK)]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for summary in pool.imap(_simulate, chunks):
                total.add(summary)
                print(*summary.failed, sep="\n", end="\n" if summary.failed else "", flush=True)
    print(
        f"{total.seeds} seeds in {time.monotonic() - began:.1f} s: {total.steps} steps, {total.redone} of them redone, "
        f"{total.user_errors} errors of user code\n  faults: {dict(total.faults)}\n  recoveries: {dict(total.recoveries)}"
    )
    print(
        f"{len(total.failed)} failed"
        + (
            ""
            if not total.failed
            else f"; to see all events, run "
            f"python -m tests.simulation --trace --seeds 1 --first {total.failed[0].split()[1].rstrip(':')}"
        )
    )
    return bool(total.failed)

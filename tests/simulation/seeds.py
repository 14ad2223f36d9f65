"""Run many seeds: `python -m tests.simulation --seeds 2000`.

`--seed 17` runs one, and prints all that happens. A seed that fails prints its plan, shortened. `--state FILE` adds the
results to those in a file: the next run continues after the last seed in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.plan import plan_for
from tests.simulation.scenario import run
from tests.simulation.shrink import shrink

__all__ = ["Summary", "main", "simulate"]

CHUNK = 50


@dataclass
class Summary:
    """The results of several seeds. Summaries can be added. `cpu_s` is processor time, `slowest_s` the longest that a
    call took in virtual time after the last fault."""

    seeds: int = 0
    steps: int = 0
    redone: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        slowest_s = max(self.slowest_s, other.slowest_s)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.slowest_s = slowest_s

    def __str__(self) -> str:
        lines = [
            f"{self.seeds} seeds, {self.cpu_s:.1f} s of processor time, {len(self.failed)} failed",
            f"  {self.steps} steps, {self.redone} of them redone; a call ended at most {self.slowest_s:.0f} s (virtual) after the "
            "last fault",
        ]
        for name in ("faults", "phases", "recoveries"):
            counts: Counter[str] = getattr(self, name)
            lines.append(
                f"  {counts.total()} {name}: " + ", ".join(f"{count} {each}" for each, count in counts.most_common())
            )
        return "\n".join(lines)

    @classmethod
    def read(cls, file: Path) -> Summary:
        """Return the summary in a file, or an empty one if there is no such file."""
        values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return cls(**{name: Counter(value) if isinstance(value, dict) else value for name, value in values.items()})

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps(vars(self), indent=1), encoding="utf-8")
        draft.replace(file)


def simulate(first: int, count: int, *, tracing: bool = False) -> Summary:
    """Run the seeds from `first` on."""
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.DEBUG if tracing else logging.CRITICAL)
    began, summary = time.process_time(), Summary()
    try:
        for seed in range(first, first + count):
            result = run(plan_for(seed), tracing=tracing)
            kinds, phases = Counter[str](), Counter[str]()
            for (kind, phase), struck in result.struck.items():
                kinds[kind] += struck
                phases[phase] += struck
            recovered = Counter(each.reason for each in result.recoveries)
            summary.add(Summary(1, result.steps, result.redone, 0.0, result.slowest_s, kinds, phases, recovered))
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


def _simulate(chunk: tuple[int, int]) -> Summary:
    return simulate(*chunk)


def _shortened(failure: str) -> str:
    """Return a failure with its shortened plan."""
    seed = int(failure.split()[1].rstrip(":"))
    logging.getLogger("raysgd").setLevel(logging.CRITICAL)
    plan = shrink(plan_for(seed))
    return f"{failure}\n  shortened: {plan!r}\n  gives: {describe(run(plan).error or AssertionError('nothing'))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many; with --state, how many in all runs together")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, with all that happens in it")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes share the work")
    parser.add_argument("--state", type=Path, help="where the results of all runs are added up")
    options = parser.parse_args()
    if options.seed is not None:
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        total = simulate(options.seed, 1, tracing=True)
    else:
        total = Summary.read(options.state) if options.state else Summary()
        first, end = options.first + total.seeds, options.first + options.seeds
        chunks = [(start, min(CHUNK, end - start)) for start in range(first, end, CHUNK)]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for summary in pool.imap(_simulate, chunks):
                total.add(summary)
                if options.state:
                    total.write(options.state)
                for failure in summary.failed:
                    print(failure, flush=True)
    print(total)
    for failure in total.failed[:5]:
        print(_shortened(failure), flush=True)
    return bool(total.failed)

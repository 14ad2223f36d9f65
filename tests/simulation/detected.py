"""Record how many seeds each mutant needs in detected.json, which docs/track_record.md shows.

`python -m tests.simulation.detected [NAME ...]` runs these mutants, or all that have no record, with `--seeds 300` each.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import driver_mutants, function_mutants, mutants
from tests.simulation.functions import function_plan_for, run_function
from tests.simulation.plan import PLANS
from tests.simulation.scenario import run

__all__ = ["RECORD", "SIMULATIONS"]

RECORD = Path(__file__).with_name("detected.json")
ENDS_S = 20.0  # of processor time, in which each seed ends if nothing is broken
Simulation = tuple[Mapping[str, Callable[[pytest.MonkeyPatch], None]], Callable[[int], Any]]
SIMULATIONS: dict[str, Simulation] = {
    "engine": (mutants.MUTANTS, lambda seed: run(PLANS[""](seed))),
    "takeovers": (driver_mutants.MUTANTS, lambda seed: run(PLANS["named"](seed))),
    "functions": (function_mutants.MUTANTS, lambda seed: run_function(function_plan_for(seed))),
}


def fails(simulated: Callable[[int], Any], seed: int) -> bool:
    """Return whether a check fails, or the run does not end."""
    signal.setitimer(signal.ITIMER_PROF, ENDS_S)
    try:
        return simulated(seed).error is not None
    except TimeoutError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def stop(*_: object) -> None:
    raise TimeoutError(f"not done after {ENDS_S} s of processor time")


def seeds_needed(
    breaks: Callable[[pytest.MonkeyPatch], None], simulated: Callable[[int], Any], most: int
) -> int | None:
    """Return the number of seeds up to the first one that fails, None if none of as many does."""
    with pytest.MonkeyPatch.context() as patch:
        breaks(patch)
        return next((seed + 1 for seed in range(most) if fails(simulated, seed)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=300)
    given = parser.parse_args()
    logging.getLogger("raysgd").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGPROF, stop)
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    for kind, (table, simulated) in SIMULATIONS.items():
        record = old[kind] = {name: seeds for name, seeds in old.get(kind, {}).items() if name in table}
        for name in table:
            if name in given.names if given.names else name not in record:
                record[name] = seeds_needed(table[name], simulated, given.seeds)
                RECORD.write_text(json.dumps(old, indent=2) + "\n", encoding="utf-8")
                print(f"{record[name]}  {name}", flush=True)


if __name__ == "__main__":
    main()

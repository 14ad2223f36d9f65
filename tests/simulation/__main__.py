"""Run many seeds: `python -m tests.simulation --seeds 2000 --first 0 [--trace]`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from tests.simulation.scenario import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="print what happens in each seed")
    options = parser.parse_args()
    logging.getLogger("raysgd").setLevel(logging.DEBUG if options.trace else logging.CRITICAL)
    if options.trace:
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
    began, failed, struck, steps, recoveries, redone = time.monotonic(), [], Counter[str](), 0, Counter[str](), 0
    for seed in range(options.first, options.first + options.seeds):
        result, world, error = run(seed)
        struck += result.struck
        steps, redone = steps + result.steps, redone + result.redone
        recoveries.update(each.reason for each in result.recoveries)
        if options.trace:
            print(result.plan, *world.trace, sep="\n")
        if error is not None:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]:.200}")
            if options.trace:
                traceback.print_exception(error)
    seconds = time.monotonic() - began
    print(f"{options.seeds} seeds in {seconds:.1f} s, {steps} steps, {redone} redone; faults {dict(struck)}; recoveries {dict(recoveries)}")
    print(f"{len(failed)} failed: {failed[:50]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""What one call costs the driver as the group grows: its processor time, and the time until the answer.

The workers train one batch of `tiny` in a call ("one batch"), or nothing at all ("nothing"): what is left
is the way there and back. A group of 16 does not fit on a small machine's cores, so workers ask for fractions
of them, and the time until the answer holds their queueing; the driver's own processor time does not.

    python examples/benchmarks/driver_cost.py --workers 2 4 8 16
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from contenders import BASE, RaySGD, cluster
from handwritten import HandWritten
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Setting

COLUMNS = ("workers", "contender", "call", "driver_cpu_ms", "answer_ms", "ratio")
Calls = dict[tuple[str, str], list[tuple[float, float]]]


def measure(workers: int, rounds: int, calls: int, cpus: float) -> list[dict[str, Any]]:
    setting = Setting(WORKLOADS["tiny"].shortened(1), workers)
    contenders = [start(setting, cpus=cpus) for start in (HandWritten, RaySGD)]
    times: Calls = {}
    try:
        for number in range(rounds + 1):
            order = contenders if number % 2 else contenders[::-1]
            for contender in [*order, *reversed(order)]:
                for label, call in (("one batch", contender.epoch), ("nothing", contender.nothing)):
                    spent = spent_on(call, calls)
                    if number > 0:
                        times.setdefault((contender.name, label), []).append(spent)
    finally:
        for contender in contenders:
            contender.stop()
    print(f"{workers} workers done", file=sys.stderr)
    return [row(workers, name, label, times) for name, label in times]


def spent_on(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """The driver's processor time (all its threads, Ray's too) and the time until the answer, of one call."""
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - busy) / calls, (time.perf_counter() - started) / calls


def row(workers: int, name: str, label: str, times: Calls) -> dict[str, Any]:
    own, base = times[name, label], times[BASE, label]
    return {
        "workers": workers,
        "contender": name,
        "call": label,
        "driver_cpu_ms": spread([cpu * 1000 for cpu, _ in own], 3),
        "answer_ms": spread([wall * 1000 for _, wall in own], 2),
        "ratio": spread([mine[1] / other[1] for mine, other in zip(own, base, strict=True)], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="in a turn, one after the other")
    parser.add_argument("--smoke", action="store_true", help="two workers, a few calls")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.workers, args.rounds, args.calls = [2], 1, 3

    rows: list[dict[str, Any]] = []
    cores = 4.0  # of the cluster, logical ones: half for each contender
    with cluster(int(cores)):
        for workers in args.workers:
            rows += measure(workers, args.rounds, args.calls, min(1.0, cores / 2 / workers))
    emit(out, "driver_cost", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

"""Time per step of raysgd and its peers against a hand-written DDP loop, in one run.

All contenders stand at the same time and train in turn, never together, in the order A B C C B A of each
round; so a slow minute of the machine hits all of them. The ratio is taken round by round, and its median is
the result. An epoch is timed on the driver, from the call to the answer, so the price of that call is in it.
On a busy machine look at the processor time per step too: what the workers' processes used, whatever else
needed the cores. With --starts, everything is started again several times, because of the same program one
process can be faster than another for as long as it lives.

    python examples/benchmarks/throughput.py --rounds 15
    python examples/benchmarks/throughput.py --rounds 2 --starts 6 --contenders hand-written raysgd "Ray Train v2" Accelerate
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from contenders import BASE, USUAL, Contender, RaySGD, cluster, missing, standing
from interleaved import Turn, interleaved, peak_mb
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Setting, Workload

COLUMNS = (
    "workload",
    "workers",
    "contender",
    "us_per_step",
    "ratio",
    "overhead_us",
    "raysgd_ratio",
    "cpu_us_per_step",
    "cpu_ratio",
    "peak_mb",
)


def measure(setting: Setting, names: Sequence[str], rounds: int, starts: int = 1) -> list[dict[str, Any]]:
    """One row per contender, with its time over that of BASE. If one fails, its row says so, and the others continue. The rounds of
    several `starts` count alike: each starts all processes again."""
    print(f"{setting.workload.name}, {setting.workers} workers", file=sys.stderr)
    failed: dict[str, str] = {}
    turns: dict[str, list[Turn]] = {}
    peaks: dict[str, float | None] = {}
    for _ in range(starts):
        contenders = standing([name for name in names if name not in failed], setting)
        ready = [contender for contender in contenders if warmed_up(contender, failed)]
        try:
            for name, own in interleaved(ready, rounds).items():
                turns.setdefault(name, []).extend(own)
            peaks |= {contender.name: peak_mb(contender.processes()) for contender in ready}
        finally:
            for contender in contenders:
                contender.stop()
    whole = {name: own for name, own in turns.items() if name not in failed}
    return [{**row(setting, name, whole, failed), "peak_mb": peaks.get(name)} for name in names]


def warmed_up(contender: Contender, failed: dict[str, str]) -> bool:
    """Lazy imports, first allocations, thread pools. False: it did not get that far, and `failed` says why."""
    try:
        contender.epoch()
    except RuntimeError as error:
        print(f"{contender.name} is left out: {error}", file=sys.stderr)
        failed[contender.name] = f"failed: {error}"
        return False
    return True


def row(setting: Setting, name: str, turns: dict[str, list[Turn]], failed: dict[str, str]) -> dict[str, Any]:
    workload = setting.workload
    head = {
        "workload": workload.name,
        "contender": name,
        "workers": setting.workers,
        "steps": workload.steps,
        "batch_size": workload.batch_size,
    }
    if name not in turns:
        return {**head, "note": failed.get(name) or f"not installed: {', '.join(missing(name))}"}
    own, base = turns[name], turns.get(BASE)
    epoch, busy = spread([turn.wall for turn in own]), spread([turn.busy for turn in own])
    pairs = list(zip(own, base, strict=True)) if base else []
    return {
        **head,
        "epoch_s": epoch,
        "us_per_step": round(epoch["median"] / workload.steps * 1e6, 1),
        "ratio": spread([mine.wall / other.wall for mine, other in pairs]),
        "overhead_us": spread([(mine.wall - other.wall) / workload.steps * 1e6 for mine, other in pairs], 1),
        "raysgd_ratio": raysgd_ratio(own, turns.get(RaySGD.name)),
        "cpu_us_per_step": round(busy["median"] / workload.steps * 1e6, 1),
        "cpu_ratio": spread([mine.busy / (other.busy or math.nan) for mine, other in pairs]),
    }


def raysgd_ratio(own: Sequence[Turn], raysgd: Sequence[Turn] | None) -> dict[str, Any] | None:
    """raysgd's time over this contender's: above 1, raysgd is behind it."""
    return spread([ours.wall / its.wall for ours, its in zip(raysgd, own, strict=True)]) if raysgd else None


def long_enough(workload: Workload, workers: int, steps: int | None) -> Workload:
    """About a second or two for an epoch: longer ones leave time for few rounds, and a median of few means little. With
    more workers than cores a step takes longer."""
    share = min(1.0, (os.cpu_count() or 1) / workers)
    usual = workload.alone or workload.steps if workers == 1 else max(1, int(workload.steps * share))
    return workload.shortened(steps or usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--contenders", nargs="+", choices=USUAL, default=USUAL)
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, help="batches per worker and epoch (default: the workload's)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of each, only to see that it runs")
    parser.add_argument("--starts", type=int, default=1, help="how often everything is started")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.rounds, args.steps, args.workloads = 1, 3, args.workloads[:2]

    rows: list[dict[str, Any]] = []
    with cluster(len(args.contenders) * max(args.workers)):
        for workers, name in itertools.product(args.workers, args.workloads):
            setting = Setting(long_enough(WORKLOADS[name], workers, args.steps), workers)
            rows += measure(setting, args.contenders, args.rounds, args.starts)
    order = list(WORKLOADS)
    rows.sort(key=lambda each: (order.index(each["workload"]), each["workers"]))
    emit(out, "throughput", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

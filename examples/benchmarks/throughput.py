"""Time per step of raysgd against a hand-written DDP loop, in one run.

All contenders stand at the same time and train in turn, never together, in the order A B B A of each round;
so a slow minute of the machine hits all of them. The ratio is taken round by round, and its median is the
result. An epoch is timed on the driver, from the call to the answer, so the price of that call is in it. On
a busy machine look at the processor time per step too: what the workers' processes used, whoever else
wanted the cores.

    python examples/benchmarks/throughput.py --rounds 15
    python examples/benchmarks/throughput.py --workloads tiny --profile
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from contenders import CONTENDERS, Contender
from profiling import where_the_time_goes
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Workload

BASE = "hand-written"
Times = dict[str, list[tuple[float, float]]]
COLUMNS = (
    "workload",
    "contender",
    "workers",
    "epoch_s",
    "us_per_step",
    "ratio",
    "cpu_us_per_step",
    "cpu_ratio",
)


def measure(workload: Workload, workers: int, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row per contender."""
    contenders = [CONTENDERS[name](workload, workers) for name in names]
    try:
        for contender in contenders:
            contender.epoch()  # lazy imports, first allocations, thread pools
        times = interleaved(contenders, rounds)
    finally:
        for contender in contenders:
            contender.stop()
    return [row(workload, workers, name, times) for name in names]


def interleaved(contenders: Sequence[Contender], rounds: int) -> Times:
    """For each contender, the mean epoch of each round."""
    times: Times = {contender.name: [] for contender in contenders}
    processes = {contender.name: contender.processes() for contender in contenders}
    for number in range(rounds):
        turn = list(contenders) if number % 2 else list(reversed(contenders))
        spent = {name: (0.0, 0.0) for name in times}
        for contender in [*turn, *reversed(turn)]:
            mine = processes[contender.name]
            started, busy = time.perf_counter(), processor_seconds(mine)
            contender.epoch()
            wall, cpu = time.perf_counter() - started, (processor_seconds(mine) - busy) / len(mine)
            before = spent[contender.name]
            spent[contender.name] = (before[0] + wall / 2, before[1] + cpu / 2)
        for name, (wall, cpu) in spent.items():
            times[name].append((wall, cpu))
        told = ", ".join(f"{name} {own[-1][0]:.3f} s ({own[-1][1]:.3f} busy)" for name, own in times.items())
        print(f"round {number + 1}: {told}", file=sys.stderr)
    return times


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


def row(workload: Workload, workers: int, name: str, times: Times) -> dict[str, Any]:
    own, base = times[name], times.get(BASE, times[name])
    epoch = spread([wall for wall, _ in own])
    busy = spread([cpu for _, cpu in own])
    return {
        "workload": workload.name,
        "contender": name,
        "workers": workers,
        "steps": workload.steps,
        "batch_size": workload.batch_size,
        "epoch_s": epoch,
        "us_per_step": round(epoch["median"] / workload.steps * 1e6, 1),
        "samples_per_s": round(workload.samples(workers) / epoch["median"], 1),
        "ratio": spread([mine[0] / other[0] for mine, other in zip(own, base, strict=True)]),
        "cpu_us_per_step": round(busy["median"] / workload.steps * 1e6, 1),
        "cpu_ratio": spread([mine[1] / (other[1] or math.nan) for mine, other in zip(own, base, strict=True)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS], default=[*CONTENDERS])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, help="batches per worker and epoch (default: the workload's)")
    parser.add_argument("--profile", action="store_true", help="say which functions raysgd's step spends time in")
    parser.add_argument("--smoke", action="store_true", help="a few steps of each, only to see that it runs")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.rounds, args.steps, args.workloads = 1, 3, args.workloads[:2]

    ray.init(address="local", num_cpus=2 * max(args.workers) + 1, include_dashboard=False, log_to_driver=False)
    rows: list[dict[str, Any]] = []
    for name in args.workloads:
        workload = WORKLOADS[name].shortened(args.steps) if args.steps else WORKLOADS[name]
        for workers in args.workers:
            rows += measure(workload, workers, args.contenders, args.rounds)
        if args.profile:
            print(where_the_time_goes(workload, max(args.workers)), file=sys.stderr)
    ray.shutdown()
    emit(out, "throughput", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

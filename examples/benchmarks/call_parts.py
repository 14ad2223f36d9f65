"""Where the milliseconds of a short call of train() go: the way to the workers, the loop, a snapshot, the steps (Linux only).

Calls of four kinds take turns, with `tiny` on two workers. `wall_ms` is what the script waits for. The others are the processor time of the
driver, of rank 0 (which takes the snapshots) and of rank 1. The last two rows are differences of those above.

    python examples/benchmarks/call_parts.py
    PYTHONPATH=/path/to/another/version python examples/benchmarks/call_parts.py      of another version of raysgd
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import BenchmarkOperator, cluster
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Setting

from raysgd import ElasticConfig, TorchTrainer

WORKERS, LONG, EPOCH = 2, 11, 5000
WHERE = ("wall_ms", "driver_cpu_ms", "rank_0_cpu_ms", "rank_1_cpu_ms")
COLUMNS = ("call", *WHERE)
EMPTY, BARE, ONE, MANY = "no step", "one step, without snapshots", "one step", f"{LONG} steps"
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def trainer(**arguments: Any) -> TorchTrainer:
    config = {"setting": Setting(WORKLOADS["tiny"].shortened(EPOCH), WORKERS)}
    return TorchTrainer(training_operator_cls=BenchmarkOperator, num_workers=WORKERS, config=config, **arguments)


def cpu_ms(process: int) -> float:
    """The processor time of all threads of a process since its start."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_MS


def turn(call: Callable[[], Any], processes: list[int], count: int) -> list[float]:
    """The median of the wall time of these calls, and the mean of each process's processor time."""
    before, took = [cpu_ms(each) for each in processes], []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1000)
    spent = [(cpu_ms(each) - old) / count for each, old in zip(processes, before, strict=True)]
    return [statistics.median(took), *spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300, help="calls of one kind in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a few calls, one round")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.calls, args.rounds = 3, 1

    with cluster(2 * WORKERS), trainer() as usual, trainer(elastic=ElasticConfig(snapshot_every=None)) as bare:
        here = {each: [os.getpid(), *each.apply_all_workers(os.getpid)] for each in (usual, bare)}
        kinds: dict[str, tuple[Callable[[], Any], list[int]]] = {
            EMPTY: (lambda: usual.apply_all_workers(os.getpid), here[usual]),
            BARE: (lambda: bare.train(num_steps=1), here[bare]),
            ONE: (lambda: usual.train(num_steps=1), here[usual]),
            MANY: (lambda: usual.train(num_steps=LONG), here[usual]),
        }
        rounds: list[dict[str, list[float]]] = []
        for number in range(args.rounds + 1):  # the first one is not counted
            found = {kind: turn(call, processes, args.calls) for kind, (call, processes) in kinds.items()}
            found["one more step"] = [(b - a) / (LONG - 1) for a, b in zip(found[ONE], found[MANY], strict=True)]
            found["one step, less what one more step takes"] = [
                whole - step for whole, step in zip(found[ONE], found["one more step"], strict=True)
            ]
            if number > 0:
                rounds.append(found)
                print({kind: [round(each, 2) for each in values] for kind, values in found.items()}, file=sys.stderr)
    rows = [
        {"call": kind, **{name: spread([each[kind][place] for each in rounds], 2) for place, name in enumerate(WHERE)}}
        for kind in rounds[0]
    ]
    emit(out, "call_parts", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

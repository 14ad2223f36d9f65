"""What a call, and the failure of a worker, cost the driver as the group grows: processor time, and time.

The workers train one batch of `tiny` in a call ("one batch"), or nothing at all ("nothing"): what is left
is the way there and back. A group of 16 does not fit on a small machine's cores, so workers ask for fractions
of them, and the time until the answer holds their queueing; the driver's own processor time does not.

In "a worker fails", one worker is killed in the middle of a call of raysgd's. `recovery_s` is what
`trainer.recoveries` says, from the first sign of the failure to the new process group. No replacement is started,
which would compete for the same cores.

    python examples/benchmarks/driver_cost.py --workers 2 4 8 16
    python examples/benchmarks/driver_cost.py --workers 32 --contenders raysgd     half of the memory
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from contenders import BASE, RaySGD, cluster
from handwritten import HandWritten
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Setting

from raysgd import ElasticConfig

COLUMNS = ("workers", "contender", "call", "driver_cpu_ms", "answer_ms", "ratio", "recovery_s")
CONTENDERS = {each.name: each for each in (HandWritten, RaySGD)}
KILL_AFTER_S, TRAIN_S = 0.5, 2.0
ELASTIC: dict[str, dict[str, Any]] = {RaySGD.name: {"elastic": ElasticConfig(grow=False)}}
Calls = dict[tuple[str, str], list[tuple[float, float]]]


def measure(
    workers: int, rounds: int, calls: int, cpus: float, names: Sequence[str], kills: int
) -> list[dict[str, Any]]:
    setting = Setting(WORKLOADS["tiny"].shortened(1), workers)
    contenders = [CONTENDERS[name](setting, cpus=cpus, **ELASTIC.get(name, {})) for name in names]
    times: Calls = {}
    failures: list[dict[str, Any]] = []
    try:
        for number in range(rounds + 1):
            order = contenders if number % 2 else contenders[::-1]
            for contender in [*order, *reversed(order)]:
                for label, call in (("one batch", contender.epoch), ("nothing", contender.nothing)):
                    spent = spent_on(call, calls)
                    if number > 0:
                        times.setdefault((contender.name, label), []).append(spent)
        for contender in contenders:
            if isinstance(contender, RaySGD) and kills:
                step_s = min(wall for _, wall in times[contender.name, "one batch"])
                failures.append(fail(contender, workers, min(kills, workers - 1), step_s))
    finally:
        for contender in contenders:
            contender.stop()
    print(f"{workers} workers done", file=sys.stderr)
    return [row(workers, name, label, times) for name, label in times] + failures


def fail(contender: RaySGD, workers: int, kills: int, step_s: float) -> dict[str, Any]:
    """Kill the last rank in the middle of a call, several times."""
    trainer, spent = contender.trainer, []
    steps = max(int(TRAIN_S / step_s), 2)

    def train() -> None:
        """Train until a failure was survived."""
        before = len(trainer.recoveries)
        while len(trainer.recoveries) == before:
            trainer.train(num_steps=steps)

    for _ in range(kills):
        victim = contender.processes()[-1]
        timer = threading.Timer(KILL_AFTER_S, os.kill, (victim, signal.SIGKILL))
        timer.start()
        spent.append(spent_on(train, 1))
        timer.join()
    return {
        "workers": workers,
        "contender": contender.name,
        "call": "a worker fails",
        "driver_cpu_ms": spread([cpu * 1000 for cpu, _ in spent], 3),
        "answer_ms": spread([wall * 1000 for _, wall in spent], 2),
        "recovery_s": spread([each.seconds for each in trainer.recoveries], 3),
    }


def spent_on(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """The driver's processor time (all its threads, Ray's too) and the time until the answer, of one call."""
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - busy) / calls, (time.perf_counter() - started) / calls


def row(workers: int, name: str, label: str, times: Calls) -> dict[str, Any]:
    own, base = times[name, label], times.get((BASE, label), [])
    return {
        "workers": workers,
        "contender": name,
        "call": label,
        "driver_cpu_ms": spread([cpu * 1000 for cpu, _ in own], 3),
        "answer_ms": spread([wall * 1000 for _, wall in own], 2),
        "ratio": spread([mine[1] / other[1] for mine, other in zip(own, base, strict=bool(base))], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="in a turn, one after the other")
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS], default=[*CONTENDERS])
    parser.add_argument("--kills", type=int, default=3, help="workers of raysgd that are killed, one after the other")
    parser.add_argument("--smoke", action="store_true", help="two workers, a few calls")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.workers, args.rounds, args.calls, args.kills = [2], 1, 3, 1

    rows: list[dict[str, Any]] = []
    cores = 4.0  # of the cluster, logical ones: half for each contender
    with cluster(int(cores)):
        for workers in args.workers:
            cpus = min(1.0, cores / 2 / workers)
            rows += measure(workers, args.rounds, args.calls, cpus, args.contenders, args.kills)
    emit(out, "driver_cost", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

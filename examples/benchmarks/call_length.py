"""What a call of train() costs beside its steps, for epochs from 10 ms to 10 s.

For each length of an epoch of `tiny`, the hand-written loop and raysgd are started, and make epochs in turn. Both are called from a
driver, so `overhead_ms` is what raysgd's call does more: elasticity, metrics over the workers, the history, a snapshot.

    python examples/benchmarks/call_length.py
"""

import argparse
import statistics
import sys
import time
from typing import Any

from contenders import RaySGD, cluster
from handwritten import HandWritten
from report import claim_stdout, emit, spread
from workloads import WORKLOADS, Setting

COLUMNS = ("steps", "hand_written_ms", "raysgd_ms", "overhead_ms", "ratio")
STEPS = (1, 5, 15, 50, 150, 500, 1500, 5000)
TURN_S = 0.5  # epochs of one turn, at least one


def measure(steps: int, workers: int, rounds: int) -> dict[str, Any]:
    setting = Setting(WORKLOADS["tiny"].shortened(steps), workers)
    contenders = [HandWritten(setting), RaySGD(setting)]
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    try:
        for number in range(rounds + 1):  # the first one is not counted
            for contender in contenders if number % 2 else contenders[::-1]:
                took = [epoch_ms(contender)]
                while sum(took) < TURN_S * 1000:
                    took.append(epoch_ms(contender))
                if number > 0:
                    times[contender.name].append(statistics.median(took))
    finally:
        for contender in contenders:
            contender.stop()
    base, own = times[HandWritten.name], times[RaySGD.name]
    print(f"{steps} steps: {statistics.median(base):.2f} ms, raysgd {statistics.median(own):.2f} ms", file=sys.stderr)
    return {
        "steps": steps,
        "hand_written_ms": spread(base, 2),
        "raysgd_ms": spread(own, 2),
        "overhead_ms": spread([mine - other for mine, other in zip(own, base, strict=True)], 2),
        "ratio": spread([mine / other for mine, other in zip(own, base, strict=True)], 3),
    }


def epoch_ms(contender: HandWritten | RaySGD) -> float:
    started = time.perf_counter()
    contender.epoch()
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", type=int, default=[*STEPS], help="batches per worker and epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="one length, one round")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.steps, args.rounds = [1, 5], 1

    with cluster(2 * args.workers):
        rows = [measure(steps, args.workers, args.rounds) for steps in args.steps]
    emit(out, "call_length", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()

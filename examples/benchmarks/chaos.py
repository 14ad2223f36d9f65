"""Random faults on a local cluster of several nodes, and whether raysgd kept its promises.

Workers are killed (SIGKILL) and stopped (SIGSTOP), nodes are removed and added, on a schedule that the seed
gives, while a small model trains. After each epoch the samples in the committed batches are compared with
the data set.

    python examples/benchmarks/chaos.py --minutes 2 --seed 1
    python examples/benchmarks/chaos.py --faults 200

Exit status 1: a sample was lost or doubled, nothing moved for too long, training failed, or a process was
left behind.
"""

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import traces
from counting import CountingOperator, lost_and_doubled
from disturbing import Disturber, LocalNodes, alive, state
from report import claim_stdout, emit

from raysgd import TorchTrainer
from raysgd.config import ElasticConfig
from raysgd.errors import RaysgdError

COLUMNS = (
    "faults",
    "recoveries",
    "epochs",
    "lost",
    "doubled",
    "batches_redone",
    "longest_gap_s",
    "goodput",
    "faults_per_10s",
    "left_behind",
)
CALM_EPOCHS = 3
LEAVE_S = 15.0
HANGS_S = 400.0


class Run:
    """One trainer under fire. Owns the counts of what was promised."""

    def __init__(self, trainer: TorchTrainer, samples: int) -> None:
        self.trainer, self.samples = trainer, samples
        self.epochs = self.lost = self.doubled = 0
        self.busy_s = 0.0

    def epoch(self) -> None:
        started = time.monotonic()
        self.trainer.train(max_retries=-1)
        self.busy_s += time.monotonic() - started
        self.epochs += 1

    def check(self) -> None:
        lost, doubled = lost_and_doubled(self.trainer, self.samples)
        self.lost += lost
        self.doubled += doubled
        if lost or doubled:
            print(f"epoch {self.epochs}: {lost} samples lost, {doubled} doubled", file=sys.stderr)

    def rate(self) -> float:
        return self.epochs * self.samples / self.busy_s if self.busy_s else 0.0


def calm(trainer: TorchTrainer, samples: int) -> float:
    """Samples per second without faults, by the same workers."""
    run = Run(trainer, samples)
    trainer.train()
    for _ in range(CALM_EPOCHS):
        run.epoch()
    return run.rate()


def storm(run: Run, disturber: Disturber, seconds: float) -> None:
    """Epochs under faults until the time is up, or enough faults have been injected."""
    until = time.monotonic() + seconds
    disturber.start()
    try:
        while time.monotonic() < until and not disturber.done:
            disturber.allowed.set()
            run.epoch()
            disturber.allowed.clear()
            with disturber.striking:
                run.check()
            told = f"{len(disturber.faults)} faults, {len(run.trainer.recoveries)} recoveries"
            print(f"epoch {run.epochs}: {told}, {run.trainer.world_size} workers", file=sys.stderr)
    finally:
        disturber.allowed.clear()
        disturber.stop()


def left_behind(trace: str) -> list[int]:
    """Workers that still run although the trainer was shut down."""
    workers = {step.process for step in traces.read(trace)}
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.2)
    return [worker for worker in workers if alive(worker)]


def figures(run: Run, disturber: Disturber, calm_rate: float, trace: str, storm_began: float) -> dict[str, Any]:
    recoveries = run.trainer.recoveries
    steps = [step for step in traces.read(trace) if step.at >= storm_began]
    return {
        "faults": len(disturber.faults),
        "faults_by_kind": disturber.counts(),
        "recoveries": len(recoveries),
        "recoveries_by_reason": dict(Counter(recovery.reason for recovery in recoveries)),
        "not_in_place": sum(not recovery.in_place for recovery in recoveries),
        "batches_redone": sum(recovery.batches_redone for recovery in recoveries),
        "epochs": run.epochs,
        "lost": run.lost,
        "doubled": run.doubled,
        "longest_gap_s": round(traces.longest_gap(steps), 2),
        "calm_samples_per_s": round(calm_rate, 1),
        "samples_per_s": round(run.rate(), 1),
        "goodput": round(run.rate() / calm_rate, 3),
        "storm_s": round(run.busy_s, 1),
        "faults_per_10s": round(10 * len(disturber.faults) / max(run.busy_s, 1e-9), 2),
        "troubles": disturber.troubles,
        "schedule": [f"{fault.at - storm_began:.1f} {fault.kind} {fault.target}" for fault in disturber.faults],
    }


def make_trainer(args: argparse.Namespace, trace: str) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=CountingOperator,
        num_workers=args.workers,
        config={"samples": args.samples, "batch_size": 8, "step_s": args.step_s, "trace": trace},
        elastic=ElasticConfig(
            hang_timeout_s=args.hang_timeout_s,
            backoff_s=0.5,
            backoff_max_s=4.0,
            max_attempts=30,
            snapshot_every=20,
        ),
    )


def chaos(args: argparse.Namespace, nodes: LocalNodes, trace: str) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what was promised and not kept."""
    at_most = args.faults or sys.maxsize
    disturber = Disturber(nodes, trace, seed=args.seed, every_s=args.every_s, at_most=at_most)
    broken: list[str] = []
    trainer = make_trainer(args, trace)
    run, calm_rate, storm_began = Run(trainer, args.samples), 1.0, time.monotonic()
    try:
        calm_rate = calm(trainer, args.samples)
        storm_began = time.monotonic()
        storm(run, disturber, args.minutes * 60)
    except RaysgdError as error:
        broken.append(f"training failed: {type(error).__name__}: {error}")
    finally:
        trainer.shutdown()
    result = figures(run, disturber, calm_rate, trace, storm_began)
    left = left_behind(trace)
    result["left_behind"] = len(left)
    broken += [f"process {worker} was left behind, in state {state(worker)}" for worker in left]
    broken += [f"{name}: {result[name]} samples" for name in ("lost", "doubled") if result[name]]
    if result["longest_gap_s"] > args.gap_limit_s:
        broken.append(f"nobody took a step for {result['longest_gap_s']} s")
    return result, broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--faults", type=int, help="stop after so many, or when the minutes are over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=4.0, help="mean time between faults")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=6000, help="in an epoch, of all workers")
    parser.add_argument("--step-s", type=float, default=0.01, help="rest in each step, as if a device worked")
    parser.add_argument("--hang-timeout-s", type=float, default=5.0)
    parser.add_argument("--gap-limit-s", type=float, default=60.0, help="longer without a step is a broken promise")
    parser.add_argument("--verbose", action="store_true", help="show raysgd's log")
    parser.add_argument("--smoke", action="store_true", help="three faults, short epochs")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.minutes, args.faults, args.every_s, args.samples = 1.0, 3, 2.0, 2000
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr)

    # Whatever hangs, this ends: with all stacks on stderr, and status 1.
    faulthandler.dump_traceback_later(args.minutes * 60 + HANGS_S, exit=True)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as trace:
        nodes = LocalNodes(trace, cpus=2, at_least=2, at_most=3)
        try:
            result, broken = chaos(args, nodes, trace)
        finally:
            nodes.shutdown()
    faulthandler.cancel_dump_traceback_later()
    emit(out, "chaos", vars(args), [{**result, "broken": broken}], COLUMNS)
    for promise in broken:
        print(f"BROKEN: {promise}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

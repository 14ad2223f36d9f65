"""Goodput while workers are killed again and again: how much of its undisturbed speed each contender keeps.

Each contender trains a number of epochs with three CPU workers, once undisturbed and once while a worker (SIGKILL,
whichever, from a seed) is lost every few seconds of training. The scripts are those of kill_one/; the times are read from
the notes of all workers' steps, as in recovery.py.

    goodput    seconds of training undisturbed over seconds with kills, for the same epochs
    kills      how many there were: who takes longer is hit more often

    python examples/benchmarks/churn.py --epochs 6 --every-s 10
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import traces
from disturbing import send
from processes import HERE, child, command_for
from recovery import Case
from report import claim_stdout, emit, spread

COLUMNS = ("contender", "goodput", "calm_s", "churn_s", "kills", "note")
LOOK_S = 0.1
ACTIVE_S = 0.5
CASES = (
    Case("raysgd", "with_raysgd.py"),
    Case("Ray Train v2, elastic", "with_ray_train.py", needs=("pandas", "pyarrow")),
    Case("torchrun", "with_torchrun.py", torchrun=("--nproc-per-node", "3", "--max-restarts", "1000")),
)


class Killer:
    """Kills one of those who train, each time so many seconds of training have passed since the last kill."""

    def __init__(self, folder: str, *, every_s: float, at_most: int, seed: int) -> None:
        self._folder, self._every_s, self._at_most = folder, every_s, at_most
        self._random = random.Random(seed)
        self._trained_s, self._looked_at = 0.0, time.monotonic()
        self.kills = 0

    def look(self) -> None:
        active = sorted(traces.active(self._folder, ACTIVE_S))
        before, self._looked_at = self._looked_at, time.monotonic()
        self._trained_s += self._looked_at - before if active else 0.0
        if active and self._trained_s >= self._every_s and self.kills < self._at_most:
            self._trained_s = 0.0
            self.kills += send(self._random.choice(active), signal.SIGKILL)


def run(case: Case, args: argparse.Namespace, disturb: Callable[[str], Killer] | None) -> dict[str, Any]:
    """All epochs once: seconds from the first step to the last, and how many kills there were."""
    with tempfile.TemporaryDirectory() as folder:
        killer = disturb(folder) if disturb else None
        settings = {
            "WORKERS": str(case.workers),
            "BATCH_SIZE": "8",
            "SAMPLES": str(args.steps * 8 * case.workers),
            "STEP_S": str(args.step_s),
            "EPOCHS": str(args.epochs),
            "TRACE": folder,
            "PYTHONPATH": str(HERE / "kill_one"),
        }
        with child(command_for(HERE / "kill_one" / case.script, torchrun=case.torchrun), settings) as process:
            deadline = time.monotonic() + args.limit_s
            while process.poll() is None and time.monotonic() < deadline:
                if killer is not None:
                    killer.look()
                time.sleep(LOOK_S)
            status = process.poll()
        steps = traces.read(folder)
    if status is None:
        return {"note": f"not done after {args.limit_s:g} s", "kills": killer.kills if killer else 0}
    if status != 0:
        raise RuntimeError(f"{case.name} ended with status {status}; set BENCHMARK_DEBUG=1 to see its messages")
    return {"seconds": steps[-1].at - steps[0].at, "kills": killer.kills if killer else 0}


def row(case: Case, rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    if case.missing():
        return {"contender": case.name, "note": f"not installed: {', '.join(case.missing())}"}
    notes = [part["note"] for both in rounds for part in both if "note" in part]
    done = [(calm, churn) for calm, churn in rounds if "seconds" in calm and "seconds" in churn]
    return {
        "contender": case.name,
        "goodput": spread([calm["seconds"] / churn["seconds"] for calm, churn in done], 3),
        "calm_s": spread([calm["seconds"] for calm, _ in done], 2),
        "churn_s": spread([churn["seconds"] for _, churn in rounds if "seconds" in churn], 2),
        "kills": sum(churn["kills"] for _, churn in rounds),
        "note": "; ".join(notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=600, help="batches of each worker in an epoch")
    parser.add_argument("--step-s", type=float, default=0.005, help="rest in each step, as if a device worked")
    parser.add_argument("--every-s", type=float, default=10.0, help="of training, from one kill to the next")
    parser.add_argument("--kills", type=int, default=sys.maxsize, help="at most so many in a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="who is not done by then is stopped")
    parser.add_argument("--smoke", action="store_true", help="raysgd, with one kill, and not undisturbed first")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.rounds, args.contenders, args.epochs, args.steps = 1, ["raysgd"], 3, 300
        args.every_s, args.kills = 0.5, 1

    asked = [case for case in CASES if not args.contenders or case.name in args.contenders]
    results: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {case.name: [] for case in asked}
    for number in range(args.rounds):

        def disturb(folder: str, seed: int = args.seed + number) -> Killer:
            return Killer(folder, every_s=args.every_s, at_most=args.kills, seed=seed)

        for case in asked:
            if not case.missing():
                calm = {} if args.smoke else run(case, args, None)
                results[case.name].append((calm, run(case, args, disturb)))
                print(f"round {number + 1}: {case.name}: {results[case.name][-1]}", file=sys.stderr)
    emit(out, "churn", vars(args), [row(case, results[case.name]) for case in asked], COLUMNS)


if __name__ == "__main__":
    main()

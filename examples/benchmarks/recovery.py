"""One of three CPU workers is killed in mid-epoch: how long nobody takes a step, and how much is done again.

Each contender is a script in kill_one/, run as a new process. Its workers note the time of every step; this
process reads along, kills rank 1 (SIGKILL) in the middle of the second epoch, and works all figures out
from those notes, in the same way for everybody. A step rests a few milliseconds, as if a device worked.

    gap_s          the longest time without a step of anybody, from the last one before the kill on
                   (growth: in the five seconds before the newcomer's first step)
    batches_redone steps that were taken before the kill and did not count in the end
    reported_s     what raysgd itself says the recovery took

    python examples/benchmarks/recovery.py --rounds 5
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import traces
from processes import HERE, PEERS, Peer, child
from report import claim_stdout, emit, spread

COLUMNS = ("case", "gap_s", "batches_redone", "lost", "doubled", "note")
LIMIT_S = 240
STEPS = 600  # batches of each worker in an epoch
GROWTH = "raysgd, growth"


@dataclass(frozen=True)
class Case:
    """One script, by default its peer's, and its settings, which are in its environment."""

    name: str
    peer: Peer
    workers: int = 3
    extra: dict[str, str] = field(default_factory=dict)
    script: str = ""

    @property
    def continues(self) -> bool:
        """Whether the epoch continues after a failure, and does not begin again."""
        return self.peer is PEERS["raysgd"]

    def command(self) -> list[str]:
        options = ("--max-restarts", "3") if self.peer.launcher else ()
        return self.peer.command(HERE / "kill_one" / (self.script or self.peer.script), self.workers, *options)


CASES = (
    Case("raysgd, in place", PEERS["raysgd"]),
    Case("raysgd, no worker left", PEERS["raysgd"], workers=1, extra={"SNAPSHOT_EVERY": "40"}),
    Case("Ray Train v2, elastic", PEERS["Ray Train v2"]),
    Case("torchrun", PEERS["torchrun"]),
)


def run(case: Case, steps: int) -> dict[str, Any]:
    """One kill; what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        victim, killed_at, output = kill_in(folder, case, steps)
        return judged(case, traces.read(folder), victim, killed_at, output)


def kill_in(folder: str, case: Case, steps: int) -> tuple[traces.Step, float, str]:
    """Runs a script to its end, with a kill in mid-epoch: the victim's last step that we saw, when it was killed, and
    what the script printed. Its notes are in the folder."""
    settings = {
        "WORKERS": str(case.workers),
        "BATCH_SIZE": "8",
        "SAMPLES": str(steps * 8 * case.workers),
        "STEP_S": "0.005",
        "TRACE": folder,
        "PYTHONPATH": str(HERE / "kill_one"),
        **case.extra,
    }
    with child(case.command(), settings) as process:
        victim = traces.wait_for_steps(
            folder,
            rank=case.workers // 2,
            epoch=1,
            count=steps // 2,
            limit_s=LIMIT_S,
            runs=lambda: process.poll() is None,
        )
        killed_at = time.monotonic()
        os.kill(victim.process, signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
        if process.returncode != 0:
            raise RuntimeError(
                f"{case.name} did not survive the kill (status {process.returncode}); "
                "set BENCHMARK_DEBUG=1 to see its messages"
            )
    return victim, killed_at, output


def judged(case: Case, steps: list[traces.Step], victim: traces.Step, killed_at: float, output: str) -> dict[str, Any]:
    """The figures of one kill, from the notes of all processes."""
    before, after = [s for s in steps if s.at <= killed_at], [s for s in steps if s.at > killed_at]
    gap_s = traces.longest_gap([before[-1], *after], within_epochs=True)
    if not case.continues:
        # They begin the epoch again, so all that was done of it is done again.
        redone = sum((step.rank, step.epoch) == (0, victim.epoch) for step in before)
        return {"gap_s": gap_s, "batches_redone": redone}
    said = json.loads(output.strip().splitlines()[-1])
    losses = [r for r in said["recoveries"] if r["reason"] != "growth"]
    result = {
        "gap_s": gap_s,
        "batches_redone": sum(r["batches_redone"] for r in losses),
        "lost": said["lost"],
        "doubled": said["doubled"],
        "losses": len(losses),
        "reported_s": sum(r["seconds"] for r in losses),
    }
    if case.workers > 1:
        # The pause for the newcomer is a row of its own.
        first = newcomers_first_step(steps, killed_at)
        growth_s = sum(r["seconds"] for r in said["recoveries"] if r["reason"] == "growth")
        survivors = [before[-1], *(s for s in after if s.at < first - growth_s)]
        result["gap_s"] = traces.longest_gap(survivors, within_epochs=True)
        result["growth"] = growth_pause(said["recoveries"], after, victim, first)
    return result


def newcomers_first_step(steps: list[traces.Step], killed_at: float) -> float:
    """When a process that had done nothing before the kill took its first step."""
    old = {step.process for step in steps if step.at <= killed_at}
    return min((step.at for step in steps if step.process not in old), default=float("inf"))


def growth_pause(
    recoveries: list[dict[str, Any]], after: list[traces.Step], victim: traces.Step, first: float
) -> dict[str, Any] | None:
    """How long the survivors stood still before the newcomer's first step."""
    grown = [r for r in recoveries if r["reason"] == "growth"]
    near = [s for s in after if s.process != victim.process and first - 5.0 < s.at <= first + 0.05]
    if not grown or not near:
        return None
    gap_s = traces.longest_gap(near, within_epochs=True)
    return {"gap_s": gap_s, "batches_redone": grown[0]["batches_redone"], "reported_s": grown[0]["seconds"]}


def arguments(text: str, cases: Sequence[Case]) -> tuple[argparse.Namespace, list[Case]]:
    """The arguments of a script, and the cases that they name. With --smoke, the first one, once, with short epochs."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases])
    parser.add_argument("--smoke", action="store_true", help=f"{cases[0].name}, once")
    args = parser.parse_args()
    args.steps = 200 if args.smoke else STEPS
    if args.smoke:
        args.rounds, args.cases = 1, [cases[0].name]
    return args, [case for case in cases if not args.cases or case.name in args.cases]


def in_turn(
    cases: Sequence[Case], rounds: int, run: Callable[[Case], dict[str, Any]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Each once in a round, forwards and backwards in turn: nobody always comes first. A peer that fails has that in its
    row, and is left out from then on; raysgd must not fail."""
    results: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            if case.peer.missing() or case.name in failed:
                continue
            try:
                results[case.name].append(run(case))
            except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                if case.continues:
                    raise
                failed[case.name] = f"failed in round {number + 1}: {told(error)}"
                print(f"{case.name} {failed[case.name]}", file=sys.stderr)
            else:
                print(f"round {number + 1}: {case.name}: {results[case.name][-1]}", file=sys.stderr)
    return results, failed


def told(error: Exception) -> str:
    """Without the command, which names this machine's folders."""
    late = isinstance(error, subprocess.TimeoutExpired)
    return f"it had not come to its end after {LIMIT_S} s" if late else str(error)


def noted(case: Case, failed: dict[str, str]) -> str:
    return f"not installed: {', '.join(case.peer.missing())}" if case.peer.missing() else failed.get(case.name, "")


def row(name: str, results: list[dict[str, Any]], note: str) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "note": note}
    for key in ("gap_s", "batches_redone", "reported_s"):
        values = [result[key] for result in results if key in result]
        row[key] = spread(values) if values else None
    for key in ("lost", "doubled"):
        row[key] = sum(result[key] for result in results) if results and key in results[0] else None
    return row


def main() -> None:
    args, asked = arguments(__doc__, CASES)
    out = claim_stdout()
    results, failed = in_turn(asked, args.rounds, lambda case: run(case, args.steps))
    groups = [result for case in asked if case.workers > 1 for result in results[case.name]]
    growth = [result["growth"] for result in groups if result.get("growth")]
    rows = [row(case.name, results[case.name], noted(case, failed)) for case in asked]
    if growth:
        rows.append(row(GROWTH, growth, ""))
    emit(out, "recovery", vars(args), rows, COLUMNS)
    if any(each.get("lost") or each.get("doubled") for each in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

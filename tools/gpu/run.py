"""Measure in minutes what raysgd does on this machine's GPUs: `make gpu`, or `python -m tools.gpu.run`.

    python -m tools.gpu.run --minutes 8 --out build/gpu
    python -m tools.gpu.run --minutes 4 --out build/gpu --phases B,B2,C,D
    python -m tools.gpu.run --out build/gpu --table first/results.jsonl second/results.jsonl

A phase is a process of its own with a limit; none keeps the others from running. Each measurement is a line of
`results.jsonl` at once; the table at the end is `results.json`, too, in the form of `examples/benchmarks/results`. All
that the phases print is in `log.txt`. With several GPUs there is a rank on each. With one, three ranks share it, which
NCCL allows when each has a host name of its own. Without a GPU, A to D run on emulations, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.gpu import carry, notes

GRACE_S = 15.0  # a phase ends by itself when its time is over; after this much more, it is killed
LEAST_S = 5.0  # less is not worth the start of a process


@dataclass(frozen=True)
class Phase:
    """One part of the run: a function of a module here, and its seconds."""

    name: str
    about: str
    seconds: float
    function: str
    shrinks: bool = False  # takes the time that is left, if that is less
    nccl: bool = False  # uses NCCL, which is emulated without a GPU
    beside: bool = False  # runs beside the following phases, where there are many cores: it mostly waits
    alone: bool = False  # not beside one of these: it takes all memory, or measures time

    @property
    def target(self) -> tuple[str, str]:
        module, _, function = self.function.partition(".")
        return f"tools.gpu.phase_{module}", function


PHASES = (
    Phase("env", "versions, clocks, memory", 15, "setting.environment"),
    Phase("tests", "pytest -m gpu", 30, "setting.tests"),
    Phase("A", "bits against a hand-written loop", 40, "bits.against_handwritten"),
    Phase("B2", "NCCL: what repeated aborts leave behind", 20, "nccl.cycles", nccl=True, alone=True),
    Phase("W", "NCCL: who is alive 75 s after a peer was killed", 100, "nccl.long_after", nccl=True, beside=True),
    Phase("B", "NCCL: what an abort frees, and what it leaves", 70, "nccl.aborts", nccl=True),
    Phase("C2", "raysgd: a kill with gloo", 70, "recovery.gloo", beside=True),
    Phase("C", "raysgd: kills at five kinds of moments, growth", 75, "recovery.moments", nccl=True),
    Phase("C4", "raysgd: the script is killed", 65, "recovery.takeover", nccl=True),
    Phase("D", "broken GPUs, and memory that runs out", 75, "faults.faults", nccl=True, alone=True),
    Phase("E", "time and memory of a step against hand-written loops", 100, "speed.ratios", shrinks=True, alone=True),
    Phase("F", "slow loaders, and waits for the device", 15, "speed.overlap", shrinks=True, alone=True),
    Phase("G", "snapshots, saves, loads and changes of workers", 90, "state.saves", shrinks=True, alone=True),
)
MANY_CORES = 8  # with fewer, phases that start workers hold each other up


def allotted(waiting: Sequence[Phase], left_s: float) -> float:
    """Return the seconds of the first of the waiting phases; 0 if too little is left. Those that shrink share what the
    others leave."""
    first = waiting[0]
    if not first.shrinks:
        return min(first.seconds, left_s) if first.seconds <= 2 * left_s else 0.0
    fixed = sum(each.seconds for each in waiting if not each.shrinks and not each.beside)
    wanted = sum(each.seconds for each in waiting if each.shrinks)
    seconds = first.seconds * min(1.0, max(0.0, left_s - fixed) / wanted)
    return seconds if seconds >= LEAST_S else 0.0


def command(phase: Phase, seconds: float, out: Path) -> list[str]:
    """Return what runs one phase."""
    chosen = ["--phase", phase.name, "--seconds", str(seconds), "--out", str(out.resolve())]
    return [sys.executable, "-m", "tools.gpu.run", *chosen]


class Run:
    """The phases that run, one after the other and beside each other, until a deadline."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.results, self.log = out / "results.jsonl", out / "log.txt"
        self._environment = {**os.environ, "PYTHONPATH": carry.search_path(), "PYTHONUNBUFFERED": "1"}
        self._deadline = time.monotonic() + seconds
        self._beside: list[tuple[Phase, subprocess.Popen[bytes], float]] = []

    def left(self) -> float:
        return self._deadline - time.monotonic()

    def play(self, phases: Sequence[Phase]) -> None:
        for number, phase in enumerate(phases):
            seconds = allotted(phases[number:], self.left())
            if not seconds or (phase.nccl and self._refused()):
                why = f"{max(0.0, self.left()):.0f} s are left" if not seconds else "NCCL forms no group here"
                self._say(phase, "not run", why)
                continue
            if phase.alone:
                self._finish_all()
            print(f"{phase.name}: {phase.about}, {seconds:.0f} s", flush=True)
            started = phase, self._start(phase, seconds), time.monotonic() + seconds + GRACE_S
            if phase.beside and (os.cpu_count() or 1) >= MANY_CORES:
                self._beside.append(started)
            else:
                self._finish(*started)
        self._finish_all()

    def _finish_all(self) -> None:
        while self._beside:
            self._finish(*self._beside.pop(0))

    def _start(self, phase: Phase, seconds: float) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            log.write(f"\n===== {phase.name}: {phase.about}\n".encode())
            log.flush()
            return subprocess.Popen(
                command(phase, seconds, self.log.parent),
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=carry.ROOT,
                start_new_session=True,
            )

    def _finish(self, phase: Phase, process: subprocess.Popen[bytes], limit: float) -> None:
        limit, status = min(limit, self._deadline), None
        try:
            status = process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say(phase, "killed at its limit", "log.txt has more")
        finally:
            with_all_of(process)
        if status:
            self._say(phase, f"ended with status {status}", "log.txt has more")

    def _refused(self) -> bool:
        """Return whether B has found that NCCL forms no group, as it may on one GPU."""
        return any(line["seen"] == "refused" for line in notes.read([self.results]))

    def _say(self, phase: Phase, seen: str, note: str) -> None:
        notes.Notes(self.results, phase.name, 0).add("the phase", seen, note=note)


def with_all_of(process: subprocess.Popen[bytes]) -> None:
    """End a phase's process, with all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def play_one(name: str, seconds: float, out: Path) -> None:
    """Be the process of one phase."""
    import torch

    (phase,) = (each for each in PHASES if each.name == name)
    instead = "" if torch.cuda.is_available() else "NCCL emulated" if phase.nccl else "on CPUs"
    if instead:
        torch.set_num_threads(1)
    module, function = phase.target
    run = getattr(importlib.import_module(module), function)
    run(notes.Notes(out / "results.jsonl", name, seconds, instead=instead))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=carry.ROOT / "build" / "gpu")
    parser.add_argument("--phases", default=",".join(each.name for each in PHASES))
    parser.add_argument("--stretch", type=float, default=1.0, help="phases may take so many times their seconds")
    parser.add_argument("--table", nargs="+", type=Path, help="only make the table of these results.jsonl")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        return play_one(args.phase, args.seconds, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    asked = args.phases.split(",")
    if unknown := set(asked) - {each.name for each in PHASES}:
        parser.error(f"there are no phases {sorted(unknown)}: choose from {', '.join(each.name for each in PHASES)}")
    if not args.table:
        for name in ("results.jsonl", "log.txt"):
            (args.out / name).unlink(missing_ok=True)
        run = Run(args.out, 60 * args.minutes)
        run.play([replace(each, seconds=args.stretch * each.seconds) for each in PHASES if each.name in asked])
    made = notes.document(notes.read(args.table or [args.out / "results.jsonl"]), ["run.py", *sys.argv[1:]])
    (args.out / "results.json").write_text(notes.written(made) + "\n", encoding="utf-8")
    print(notes.table(made))


if __name__ == "__main__":
    main()

"""Random faults of every kind on a local cluster of several nodes, and whether raysgd kept its promises.

A small model trains while processes, connections, nodes, a disk and the driver itself are disturbed, on a schedule that the
seed gives (`disturbing.py` lists the kinds). After each epoch the samples that the weights have seen are compared with the
data set, and the weights of the ranks with each other.

    python examples/benchmarks/chaos.py --minutes 2 --seed 1
    python examples/benchmarks/chaos.py --faults 200 --backend horovod --api function
    python examples/benchmarks/chaos.py --state build/chaos.json --parts 10 --faults 200

With --state, parts with one seed each accumulate in a file, each a program of its own, and the table is of all of them. Where
the system allows it, each part has its own processes, network, /tmp and /dev/shm, so that nothing it leaves can hide.

Exit status 1: a sample was lost or used twice, weights differed, no worker took a step for too long, training failed, or
something was left behind.
"""

import argparse
import faulthandler
import logging
import os
import secrets
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import traces
from disturbing import Disk, Disturber, Fault, LocalNodes, alive, state
from harming import forget_memory_limits
from parts import ISOLATED, NO_CLUSTER, accumulate, presented
from report import claim_stdout, emit
from subjects import SUBJECTS, Subject, Training, injected

COLUMNS = (
    "run",
    "kind",
    "backend",
    "api",
    "parts",
    "faults",
    "lost",
    "doubled",
    "longest_wait_s",
    "faults_per_10s",
    "left_behind",
)
LEAVE_S = 60.0
HANGS_S = 900.0
RENDEZVOUS_S = 60.0  # for the rendezvous of a generation, after whatever had to be detected (docs/guarantees.md)
FOLLOWS_S = 2.0
MARK = "RAYSGD_CHAOS"
# What docs/elasticity.md says a killed worker can leave, and torch's cache.
EXPECTED = ("/dev/shm/torch_", "/tmp/raysgd-worker-", "/tmp/raysgd-code-", "/tmp/torchinductor_")


class Run:
    """One trainer under fire. Owns the counts of what was promised."""

    def __init__(self, subject: Subject, disk: Disk, samples: int) -> None:
        self.subject, self.disk, self.samples = subject, disk, samples
        self.epochs = self.lost = self.doubled = self.differing = self.raised = 0
        self.busy_s = 0.0

    def epoch(self) -> None:
        started = time.monotonic()
        while True:
            try:
                self.subject.epoch()
                break
            except Exception as error:
                if not injected(error):
                    raise
                self.raised += 1
                self.disk.make_room()
        self.busy_s += time.monotonic() - started
        self.epochs += 1

    def check(self) -> None:
        self.disk.make_room()
        lost, doubled, differing = self.subject.checked()
        self.lost, self.doubled, self.differing = self.lost + lost, self.doubled + doubled, self.differing + differing
        if lost or doubled or differing:
            print(f"epoch {self.epochs}: {lost} lost, {doubled} doubled, {differing} ranks differ", file=sys.stderr)


def storm(run: Run, disturber: Disturber, seconds: float) -> None:
    """Epochs under faults until the time is up, or enough faults have been injected."""
    disturber.start(seconds)
    try:
        while not disturber.done:
            disturber.allowed.set()
            run.epoch()
            disturber.allowed.clear()
            with disturber.striking:
                run.check()
            told = f"{len(disturber.faults)} faults, {len(run.subject.trainer.recoveries)} recoveries"
            print(f"epoch {run.epochs}: {told}, {run.raised} errors raised", file=sys.stderr, flush=True)
    finally:
        disturber.allowed.clear()
        disturber.stop()


def waits(faults: Sequence[Fault], steps: Sequence[traces.Step]) -> dict[str, float]:
    """For each kind, the longest time without a step of anybody that began at most two seconds after such a fault."""
    times = [step.at for step in steps]
    longest: dict[str, float] = {}
    for fault in faults:
        first, last = bisect_left(times, fault.at), bisect_left(times, fault.at + FOLLOWS_S)
        near = times[max(0, first - 1) : last + 1]
        gaps = [later - earlier for earlier, later in pairwise(near)]
        longest[fault.kind] = round(max([longest.get(fault.kind, 0.0), *gaps]), 2)
    return longest


def marked(mark: str) -> list[int]:
    """The processes, other than this one, that were started in this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        process = int(path.parent.name)
        try:
            if process != os.getpid() and f"{MARK}={mark}".encode() in path.read_bytes() and alive(process):
                found.append(process)
        except OSError:
            continue
    return found


def left_behind(mark: str, before: set[str]) -> list[str]:
    """Processes, connections and files that are still there although all was shut down."""
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.2)
    left = [f"process {each} ({state(each)}) {command_of(each)}" for each in marked(mark)]
    return left + sorted(files() - before)


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()


def files() -> set[str]:
    """What is in the folders that all programs share, and who listens; only if no other program can use them now."""
    if not os.environ.get(ISOLATED):
        return set()
    listening = [
        f"socket {line.split()[1]}"
        for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    return {*listening, *(str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir())}


def figures(run: Run, disturber: Disturber, trace: str, storm_began: float) -> dict[str, Any]:
    recoveries = run.subject.trainer.recoveries
    steps = [step for step in traces.read(trace) if step.at >= storm_began]
    return {
        "faults": len(disturber.faults),
        "faults_by_kind": disturber.counts(),
        "waits_by_kind": waits(disturber.faults, steps),
        "recoveries": len(recoveries),
        "recoveries_by_reason": dict(Counter(recovery.reason for recovery in recoveries)),
        "errors_raised": run.raised,
        "epochs": run.epochs,
        "samples": run.epochs * run.samples,
        "lost": run.lost,
        "doubled": run.doubled,
        "differing": run.differing,
        "longest_wait_s": round(traces.longest_gap(steps, within_epochs=True), 2),
        "storm_s": round(run.busy_s, 1),
        "faults_per_10s": round(10 * len(disturber.faults) / max(run.busy_s, 1e-9), 2),
        "left_out": disturber.left_out,
        "troubles": disturber.troubles,
        "schedule": [f"{fault.at - storm_began:.1f} {fault.kind} {fault.hit}" for fault in disturber.faults],
        "recovered": [f"{each.reason} {each.removed_ranks} {each.seconds:.1f} s {each.detail}" for each in recoveries],
    }


def untouched(disturber: Disturber, trace: str) -> list[int]:
    """Workers that have ended although no fault hit them."""
    hit = {process for fault in disturber.faults for process in fault.hit}
    return sorted({step.process for step in traces.read(trace) if not alive(step.process)} - hit)


def chaos(args: argparse.Namespace, nodes: LocalNodes, disk: Disk, trace: str) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what was promised and not kept."""
    options = {"at_most": args.faults or sys.maxsize, "hang_s": args.hang_timeout_s}
    disturber = Disturber(nodes, disk, trace, seed=args.seed, every_s=args.every_s, **options)
    training = Training(
        args.backend, args.workers, args.samples, args.step_s, args.hang_timeout_s, trace, str(disk.folder)
    )
    subject = SUBJECTS[args.api](training)
    run, storm_began = Run(subject, disk, args.samples), time.monotonic()
    broken = disturber.broken
    try:
        storm(run, disturber, args.minutes * 60)
    except Exception as error:
        logging.exception("the storm ended")
        broken.append(f"training failed: {type(error).__name__}: {error}")
    finally:
        result = figures(run, disturber, trace, storm_began)
        result["ended_untouched"] = len(untouched(disturber, trace))
        disk.make_room()
        subject.trainer.shutdown()
    broken += [f"{name}: {result[name]}" for name in ("lost", "doubled", "differing") if result[name]]
    result["wait_limit_s"] = args.hang_timeout_s + RENDEZVOUS_S
    if result["longest_wait_s"] > result["wait_limit_s"]:
        broken.append(f"no worker took a step for {result['longest_wait_s']} s")
    return result, broken


def cluster(folder: str, args: argparse.Namespace) -> LocalNodes:
    """A part whose cluster does not even start, on a machine that is too busy, says nothing about raysgd."""
    try:
        return LocalNodes(folder, cpus=args.workers, at_least=min(args.nodes, 1), at_most=args.nodes)
    except Exception:
        logging.exception("Ray did not start")
        sys.exit(NO_CLUSTER)


def part(args: argparse.Namespace) -> dict[str, Any]:
    mark = os.environ[MARK] = secrets.token_hex(8)
    before = files()
    # Whatever hangs, this ends: with all stacks on stderr, and status 1.
    faulthandler.dump_traceback_later(args.minutes * 60 + HANGS_S, exit=True)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        disk = Disk(Path(folder) / "disk")
        nodes = cluster(folder, args)
        try:
            result, broken = chaos(args, nodes, disk, folder)
        finally:
            nodes.shutdown()
            disk.close()
            forget_memory_limits()
    left = left_behind(mark, before)
    faulthandler.cancel_dump_traceback_later()
    broken += [f"left behind: {each}" for each in left if not each.startswith(EXPECTED)]
    head = {"backend": args.backend, "api": args.api, "seed": args.seed, "workers": args.workers}
    return {**head, **result, "left_behind": len(left), "broken": broken}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["torch", "horovod"], default="torch")
    parser.add_argument("--api", choices=[*SUBJECTS], default="class")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each part")
    parser.add_argument("--faults", type=int, help="stop a part after so many, or when its minutes are over")
    parser.add_argument("--seed", type=int, default=0, help="of the first part")
    parser.add_argument("--state", type=Path, help="add parts to this file, and report all that it has")
    parser.add_argument(
        "--parts", type=int, default=1, help="how many seeds, from --seed on; those in the file are skipped"
    )
    parser.add_argument("--every-s", type=float, default=1.0, help="mean time between faults")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--nodes", type=int, default=2, help="that hold workers and can fail; 0: there is only the driver's"
    )
    parser.add_argument("--samples", type=int, default=3000, help="in an epoch, of all workers")
    parser.add_argument("--step-s", type=float, default=0.01, help="rest in each step, as if a device worked")
    parser.add_argument("--hang-timeout-s", type=float, default=5.0)
    parser.add_argument("--verbose", action="store_true", help="show raysgd's log")
    parser.add_argument("--smoke", action="store_true", help="three faults, short epochs")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.faults, args.every_s, args.samples = 1.0, 3, 2.0, 2000
    return args


def main() -> None:
    args = arguments()
    out = claim_stdout()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr)
    rows = presented(accumulate(args.state, args)) if args.state else [part(args)]
    emit(out, "chaos", vars(args), rows, COLUMNS)
    broken = [promise for row in rows for promise in row.get("broken", [])]
    for promise in broken:
        print(f"BROKEN: {promise}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

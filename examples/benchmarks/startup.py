"""How long a fresh script needs to the end of its first tiny epoch, with 2 workers.

Each contender is a script in first_epoch/, run as a new process each time; the rounds are interleaved, and
each begins with another contender. What is timed: from the start of the process to the line "first epoch
done", and to its exit.

    python examples/benchmarks/startup.py --rounds 7
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import PEERS, Peer, child
from report import claim_stdout, emit, spread

SCRIPTS = Path(__file__).resolve().parent / "first_epoch"
BASE = "Ray Train v2"
# Of raysgd: the imports of the script are done; Ray runs and the trainer exists; and, from there on alone, a second trainer
# of the script has taken its first step.
PARTS = ("imported", "connected", "second")
COLUMNS = ("contender", "imported_s", "connected_s", "first_epoch_s", "exit_s", "ratio", "torchrun_ratio", "second_s")
LIMIT_S = 180


PROGRAMS = tuple(peer for peer in PEERS.values() if (SCRIPTS / peer.script).exists())


def run(program: Peer) -> dict[str, float]:
    """Seconds to the end of the first epoch, to the end of the process, and to what else the program tells."""
    started, began = time.perf_counter(), time.time()
    with child(program.command(SCRIPTS / program.script, 2), {}) as process:
        assert process.stdout is not None
        reported: dict[str, float] = {}
        for line in process.stdout:
            name, _, value = line.strip().partition(" ")
            if line.strip() == "first epoch done":
                reported["first_epoch"] = time.perf_counter() - started
            elif name in ("imported", "connected"):
                reported[name] = float(value) - began
            elif name == "second":
                reported[name] = float(value)
        status = process.wait(timeout=LIMIT_S)
        if "first_epoch" not in reported:
            raise RuntimeError(
                f"{program.script} ended with status {status} before its first epoch was done; "
                "set BENCHMARK_DEBUG=1 to see its messages"
            )
        return {**reported, "exit": time.perf_counter() - started}


def measure(programs: Sequence[Peer], rounds: int) -> dict[str, list[dict[str, float]]]:
    seconds: dict[str, list[dict[str, float]]] = {program.name: [] for program in programs}
    for number in range(rounds):
        first = number % len(programs)
        for program in [*programs[first:], *programs[:first]]:
            seconds[program.name].append(run(program))
            print(
                f"round {number + 1}: {program.name} {seconds[program.name][-1]['first_epoch']:.1f} s", file=sys.stderr
            )
    return seconds


def row(program: Peer, seconds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    if program.name not in seconds:
        return {"contender": program.name, "note": f"not installed: {', '.join(program.missing())}"}
    own = seconds[program.name]

    def ratio_to(name: str) -> dict[str, Any]:
        pairs = zip(own, seconds.get(name, []), strict=False)
        return spread([mine["first_epoch"] / other["first_epoch"] for mine, other in pairs], 3)

    parts = {f"{name}_s": spread([each[name] for each in own], 2) for name in PARTS if name in own[0]}
    return {
        "contender": program.name,
        **parts,
        "first_epoch_s": spread([each["first_epoch"] for each in own], 2),
        "exit_s": spread([each["exit"] for each in own], 2),
        "ratio": ratio_to(BASE),
        "torchrun_ratio": ratio_to("torchrun"),
        "note": "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", nargs="+", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--smoke", action="store_true", help="raysgd and torchrun, once")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.rounds, args.contenders = 1, ["raysgd", "torchrun"]

    asked = [program for program in PROGRAMS if not args.contenders or program.name in args.contenders]
    seconds = measure([program for program in asked if not program.missing()], args.rounds)
    emit(out, "startup", vars(args), [row(program, seconds) for program in asked], COLUMNS)


if __name__ == "__main__":
    main()

"""How long a fresh script needs to the end of its first tiny epoch, with 2 workers.

Each contender is a script in first_epoch/, run as a new process each time; the rounds are interleaved, and
each begins with another contender. What is timed: from the start of the process to the line "first epoch
done", and to its exit.

    python examples/benchmarks/startup.py --rounds 7
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import child, command_for
from report import claim_stdout, emit, spread

SCRIPTS = Path(__file__).resolve().parent / "first_epoch"
BASE = "Ray Train v2"
COLUMNS = ("contender", "first_epoch_s", "exit_s", "ratio", "note")
LIMIT_S = 180


@dataclass(frozen=True)
class Program:
    name: str
    script: str
    torchrun: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


PROGRAMS = (
    Program("raysgd", "with_raysgd.py"),
    Program(BASE, "with_ray_train.py", needs=("pandas", "pyarrow")),
    Program("torchrun", "with_torchrun.py", torchrun=("--nproc-per-node", "2")),
    Program("Lightning", "with_lightning.py", torchrun=("--nproc-per-node", "2"), needs=("lightning",)),
    Program("Accelerate", "with_accelerate.py", torchrun=("--nproc-per-node", "2"), needs=("accelerate",)),
    Program("hand-written, Ray actors", "by_hand.py"),
)


def run(program: Program) -> tuple[float, float]:
    """Seconds to the end of the first epoch, and to the end of the process."""
    started = time.perf_counter()
    with child(command_for(SCRIPTS / program.script, torchrun=program.torchrun), {}) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.strip() == "first epoch done")
        if next(lines, None) is None:
            raise RuntimeError(
                f"{program.script} ended with status {process.wait()} before its first epoch was done; "
                "set BENCHMARK_DEBUG=1 to see its messages"
            )
        done = time.perf_counter() - started
        process.wait(timeout=LIMIT_S)
        return done, time.perf_counter() - started


def measure(programs: Sequence[Program], rounds: int) -> dict[str, list[tuple[float, float]]]:
    seconds: dict[str, list[tuple[float, float]]] = {program.name: [] for program in programs}
    for number in range(rounds):
        first = number % len(programs)
        for program in [*programs[first:], *programs[:first]]:
            seconds[program.name].append(run(program))
            print(f"round {number + 1}: {program.name} {seconds[program.name][-1][0]:.1f} s", file=sys.stderr)
    return seconds


def row(program: Program, seconds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    if program.name not in seconds:
        return {"contender": program.name, "note": f"not installed: {', '.join(program.missing())}"}
    own, base = seconds[program.name], seconds.get(BASE, [])
    return {
        "contender": program.name,
        "first_epoch_s": spread([first for first, _ in own], 2),
        "exit_s": spread([end for _, end in own], 2),
        "ratio": spread([mine[0] / other[0] for mine, other in zip(own, base, strict=False)], 3),
        "note": "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
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

"""All benchmarks, one after the other, each a program of its own; their results as files, a page and plots.

    make bench                                             the claims of docs/benchmarks.md: under an hour on two cores
    make bench ARGS=--all                                  also what takes longer: complete programs, many ranks
    python examples/benchmarks/bench.py --quick            fewer rounds and settings, into build/benchmarks
    python examples/benchmarks/bench.py --only saving startup

A benchmark that fails does not keep the others from running. Its name is printed at the end, and the status is 1.
"""

import argparse
import importlib.util
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fill_page import OTHER_PAGES, PAGE, RESULTS, fill
from processes import HERE

QUICK_RESULTS = HERE.parents[1] / "build" / "benchmarks"
LIMIT_S = 3 * 3600


@dataclass(frozen=True)
class Benchmark:
    """A script, and its arguments for the page and for a quick look."""

    name: str
    full: str
    quick: str
    takes_longer: bool = False

    def command(self, kind: str) -> list[str]:
        options = {"full": self.full, "quick": self.quick, "smoke": "--smoke"}[kind]
        return [sys.executable, str(HERE / f"{self.name}.py"), *shlex.split(options)]


BENCHMARKS = (
    Benchmark("throughput", "--workers 1 2 --starts 2 --rounds 2", "--workers 2 --rounds 3"),
    Benchmark("stepping", "--starts 3", "--starts 1 --rounds 2"),
    Benchmark("call_length", "", "--steps 1 50 500 --rounds 3"),
    Benchmark("startup", "--rounds 7", "--rounds 1"),
    Benchmark("recovery", "--rounds 2", "--rounds 1"),
    Benchmark("kill_curve", "", ""),
    Benchmark("rerun", "--rounds 1", "--rounds 1"),
    Benchmark("saving", "--sizes 10 100 1000 --rounds 3", "--sizes 10 100 1000 --rounds 2"),
    Benchmark("sizes", "--sizes 1000 100 10", "--sizes 100 --optimizers Adam --seconds 10", takes_longer=True),
    Benchmark("same_numbers", "", "--only gpt --epochs 4", takes_longer=True),
    Benchmark("unequal", "", "--rounds 1", takes_longer=True),
    Benchmark("scale", "", "--ranks 100 1000", takes_longer=True),
)


def run(benchmark: Benchmark, kind: str, into: Path) -> bool:
    """Runs one to its end; its document is put in place only when it is whole."""
    command = benchmark.command(kind)
    print(f"--- {shlex.join(command[1:])}", file=sys.stderr, flush=True)
    started, draft = time.monotonic(), into / f"{benchmark.name}.json.part"
    with draft.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, stdout=file, timeout=LIMIT_S, check=False).returncode
    print(f"--- {benchmark.name}: status {status}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    if status == 0:
        draft.replace(into / f"{benchmark.name}.json")
    else:
        draft.unlink()
    return status == 0


def present(into: Path, page: Path | None) -> None:
    """Plots beside the results; for the page, in its own folder, with its tables filled."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plots (pip install 'raysgd[bench]')", file=sys.stderr)
    else:
        from plots import plot_all

        for path in plot_all(into, into if page is None else page.parent / "benchmarks"):
            print(f"plotted {path}", file=sys.stderr)
    if page is not None:
        for each in (page, *OTHER_PAGES):
            fill(into, each)
            print(f"filled {each}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--quick", action="store_const", dest="kind", const="quick", help="fewer rounds, about ten minutes"
    )
    kinds.add_argument("--smoke", action="store_const", dest="kind", const="smoke", help="only to see that all run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=[each.name for each in BENCHMARKS])
    which.add_argument("--all", action="store_true", help="also those that take longer")
    parser.add_argument(
        "--into", type=Path, help="the folder for the results (default: the page's, or build/benchmarks)"
    )
    parser.set_defaults(kind="full")
    args = parser.parse_args()
    full = args.kind == "full" and args.into is None
    into = args.into or (RESULTS if full else QUICK_RESULTS)
    into.mkdir(parents=True, exist_ok=True)

    asked = [
        each for each in BENCHMARKS if (each.name in args.only if args.only else args.all or not each.takes_longer)
    ]
    failed, started = [], time.monotonic()
    for benchmark in asked:
        if not run(benchmark, args.kind, into):
            failed.append(benchmark.name)
    print(f"--- {len(asked)} benchmarks: {(time.monotonic() - started) / 60:.0f} minutes", file=sys.stderr)
    present(into, PAGE if full else None)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Prove the promises that can be proven on two cores: `make prove` writes build/prove.html.

Each part runs a benchmark, a command or tests of this repository as a process, and its last lines are in the page. Exit
status 1: something is not as promised, and the page says what.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "build" / "prove.html"
SHOWN_LINES = 25
NAMED = "tests/elastic/test_named_trainers.py::test_a_script_that_is_killed_at_any_moment_continues"
KILLS = "tests/emulated/test_nccl_kills.py::"
EQUAL = re.compile(r"same bits|\d(\.\d)?e-0[5-9]")


class Part(NamedTuple):
    """What is promised, the command that shows it, a function of its output that returns the figure of the page, or
    raises a ValueError, and one that draws a picture."""

    promise: str
    command: Sequence[str]
    figure: Callable[[str], str]
    picture: Callable[[str], str] = lambda _: ""
    limit_s: float = 900.0  # against hangs: a busy machine takes several times longer


class Shown(NamedTuple):
    part: Part
    kept: bool
    figure: str
    seconds: float
    output: str


def document(output: str) -> dict[str, Any]:
    """Return the document of a benchmark, which is on its standard output."""
    found: dict[str, Any] = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    return found


def curve(output: str) -> str:
    row = document(output)["rows"][0]
    if row["repeated_samples"] or not row["still_s"]:
        raise ValueError(f"{row['repeated_samples']} samples were repeated, and {row['still_s']} s are without a step")
    return f"{row['still_s']} s without a step, {row['before']:.0f} samples per second before, none repeated"


def drawn(output: str) -> str:
    """Return the curve of new samples per second, with a line where the worker was killed."""
    row = document(output)["rows"][0]
    rates, before = row["new_per_s"], row["from_s"].index(0.0)
    heights = [80 * rate / max(rates) for rate in rates]
    bars = [
        f'<rect x="{20 * n}" y="{80 - high:.0f}" width="18" height="{high:.0f}"/>' for n, high in enumerate(heights)
    ]
    killed = f'<path d="M{20 * before - 1} 0V80" stroke="#b00" stroke-width="2"/>'
    return f'<svg width="{20 * len(rates)}" height="80" fill="#468">{"".join(bars)}{killed}</svg>'


def equal(output: str) -> str:
    """All three ways end with the figure and the weights of the loop by hand, up to rounding."""
    rows = document(output)["rows"]
    for row in rows:
        for way in ("raysgd", "three_kills", "started_again"):
            figure, _, apart = row[way].partition(", ")
            if not EQUAL.fullmatch(apart):
                raise ValueError(f"{row['program']}, {way}: {figure} and {apart}, by hand {row['by_hand']}")
    return "; ".join(f"{row['program']}: {row['figure']} {row['by_hand']} in four ways" for row in rows)


def said(pattern: str) -> Callable[[str], str]:
    """Return a function that looks for the last text of this form in the output."""

    def found(output: str) -> str:
        texts = [each[0] for each in re.finditer(pattern, output)]
        if not texts:
            raise ValueError(f"the output has nothing like {pattern!r}")
        return texts[-1]

    return found


def tests(*names: str, tier: str = "test") -> list[str]:
    return ["env", f"RAYSGD_TIER={tier}", sys.executable, "-m", "pytest", "-q", "-n", "0", *names]


PASSED = said(r"\d+ passed.*")
PARTS = (
    Part(
        "When one of three workers is killed, the others continue, and no sample is repeated",
        [sys.executable, "examples/benchmarks/kill_curve.py", "--smoke"],
        curve,
        drawn,
    ),
    Part(
        "Under 20 signals to workers, each sample enters the weights as often as without them",
        [
            *(sys.executable, "-c", "from raysgd.cli import main; main()", "drill", "tests/cli/drilled.py:Clean"),
            *("--calls", "21", "--steps", "8", "--set", "elastic.hang_timeout_s=5"),
        ],
        said(r"samples .*each as often"),
    ),
    Part(
        "None of 2,000 simulated schedules of faults breaks a promise",
        [sys.executable, "-m", "tests.simulation", "--seeds", "2000"],
        said(r"[\d,]+ seeds, .* 0 failed"),
    ),
    Part(
        "Tests notice when the code is broken on purpose",
        tests(
            "tests/local/test_faults.py",
            "tests/simulation/test_simulation.py",
            "tests/test_mutants.py",
            "-k",
            "detected",
        ),
        PASSED,
    ),
    Part(
        "With NCCL, emulated, no step acts on gradients that an abort has cut off",
        tests(f"{KILLS}test_kills_in_a_step", f"{KILLS}test_a_replacement_is_killed_while_it_joins"),
        PASSED,
    ),
    Part(
        "A script with a named trainer, killed five times, continues where it was",
        tests(*(f"{NAMED}[{seed}]" for seed in range(5)), tier="nightly"),
        PASSED,
    ),
    Part(
        "Two programs end with the numbers of loops by hand, also when workers and the script are killed",
        [sys.executable, "examples/benchmarks/same_numbers.py", "--only", "text_classifier", "resnet", "--epochs", "4"],
        equal,
    ),
)


def shown(part: Part) -> Shown:
    """Run a part."""
    began = time.monotonic()
    command = dict(cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, encoding="utf-8")
    try:
        done = subprocess.run(part.command, capture_output=True, timeout=part.limit_s, **command)  # type: ignore[call-overload]
        output = f"{done.stderr}\n{done.stdout}"
        if done.returncode:
            raise ValueError(f"exit status {done.returncode}")
        kept, figure = True, part.figure(output)
    except subprocess.TimeoutExpired as error:
        kept, figure, output = (
            False,
            f"not done after {part.limit_s:.0f} s",
            (error.stderr or b"").decode(errors="replace"),
        )
    except (ValueError, LookupError) as error:
        kept, figure = False, str(error)
    return Shown(part, kept, figure, time.monotonic() - began, output)


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>raysgd: what is promised</title>
<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{text-align:left;vertical-align:top;
padding:.4em .8em;border-top:1px solid #ccc}.no{color:#b00;font-weight:bold}pre{font-size:12px;overflow:auto}</style>"""


def page(found: Sequence[Shown], machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    kept = sum(each.kept for each in found)
    rows = [
        f"<tr><td>{html.escape(each.part.promise)}<td class={'yes' if each.kept else 'no'}>"
        f"{'as promised' if each.kept else 'NOT as promised'}<td>{html.escape(each.figure)}"
        f"{each.part.picture(each.output) if each.kept else ''}<td>{each.seconds:.0f}&nbsp;s"
        for each in found
    ]
    outputs = [
        f"<details><summary>{html.escape(each.part.promise)}</summary><pre>{html.escape(' '.join(each.part.command))}\n\n"
        + html.escape("\n".join(each.output.splitlines()[-SHOWN_LINES:]))
        + "</pre></details>"
        for each in found
    ]
    about = (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, Python {machine['python']}, {versions}"
    )
    return "\n".join(
        [
            *(HEAD, f"<h1>{kept} of {len(found)} as promised</h1><p>{html.escape(about)}</p>"),
            *("<table><tr><th>promise<th><th>figure<th>time", *rows, "</table><h2>Outputs</h2>", *outputs, "</html>\n"),
        ]
    )


def main() -> int:
    sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
    machine = importlib.import_module("report").machine()
    found = []
    for part in PARTS:
        found.append(shown(part))
        print(f"{'as promised' if found[-1].kept else 'NOT':12} {part.promise}: {found[-1].figure}", flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found, machine), encoding="utf-8")
    print(f"The page is {PAGE.relative_to(ROOT)}")
    return int(not all(each.kept for each in found))


if __name__ == "__main__":
    sys.exit(main())

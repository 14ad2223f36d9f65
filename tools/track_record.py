"""Write docs/track_record.md from docs/track_record.txt and the tests: `python tools/track_record.py`; `--check` compares.

The schedules that broke a guarantee once are those of the tables FOUND in the tests, and a row of the text names the
test that fails if its defect comes back. The mutants are those of the tests, with the recorded seeds that detect them.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "track_record.txt"
PAGE = ROOT / "docs" / "track_record.md"
RECORD = ROOT / "tests" / "simulation" / "detected.json"
SECTION = re.compile(r"\[(?P<name>\w+)\] (?P<title>.+)")


class Defect(NamedTuple):
    who: str
    wrong: str
    test: str
    shown: str  # where the defect can be seen: the test, or the seed in its file


class Group(NamedTuple):
    name: str
    title: str
    defects: list[Defect]


def groups() -> list[Group]:
    """Return the rows of the text."""
    found: list[Group] = []
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        if section := SECTION.fullmatch(line):
            found.append(Group(section["name"], section["title"], []))
        elif line and not line.startswith("#"):
            first, second, test = line.split(" | ")
            rows = from_table(second, test) if first == "FOUND" else [Defect(first, second, test, f"`{test}`")]
            found[-1].defects.extend(rows)
    return found


def from_table(who: str, test: str) -> Iterator[Defect]:
    """Yield the rows of the table FOUND in the file of a test."""
    file = test.split("::")[0]
    table: Mapping[str, Any] = importlib.import_module(file.removesuffix(".py").replace("/", ".")).FOUND
    for wrong, plan in table.items():
        seed = getattr(plan, "seed", 0)
        yield Defect(who, wrong, test, f"seed {seed}, `{file}`" if seed else f"`{file}`")


def exists(test: str) -> bool:
    path, name = test.split("::")
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body if (ROOT / path).is_file() else []
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in body)


def wrong(found: list[Group]) -> Iterator[str]:
    """Yield the tests that do not exist, and the tables FOUND that no line names."""
    tests = sorted({each.test for group in found for each in group.defects})
    yield from (f"docs/track_record.txt names {test}, which does not exist" for test in tests if not exists(test))
    for name, (test, _) in importlib.import_module("tests.mutants").MUTANTS.items():
        if not exists(test.split("[")[0]):
            yield f"the mutant {name} names {test}, which does not exist"
    for kind, (module, _) in SIMULATED.items():
        for name in importlib.import_module(f"tests.simulation.{module}").MUTANTS.keys() - recorded()[kind].keys():
            yield f"the mutant {name} has no recorded seeds: run `python -m tests.simulation.detected`"
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        table = re.search(r"(?m)^FOUND\b", file.read_text(encoding="utf-8"))
        if table and not re.search(rf"(?m)^FOUND \|.* {name}::", SOURCE.read_text(encoding="utf-8")):
            yield f"docs/track_record.txt lacks the table FOUND of {name}"


# The mutants of the simulations, the file of each kind, and the test that runs SEEDS of its seeds.
SIMULATED = {
    "engine": ("mutants", "test_simulation"),
    "takeovers": ("driver_mutants", "test_drivers"),
    "functions": ("function_mutants", "test_functions"),
}
HEADS = "| what it breaks | mutant | detected by |"


class Mutant(NamedTuple):
    breaks: str
    name: str
    detected: str


def subjects(file: Path) -> dict[str, str]:
    """Return the heading above each function of a file."""
    found, heading = {}, ""
    for line in file.read_text(encoding="utf-8").splitlines():
        heading = line.strip("# -") if line.startswith("# -- ") else heading
        if line.startswith("def "):
            found[line[4:].split("(")[0]] = heading
    return found


def recorded() -> dict[str, dict[str, int | None]]:
    """Return the seeds that each mutant of the simulations needs, by their kind."""
    found: dict[str, dict[str, int | None]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def simulated_mutants() -> Iterator[Mutant]:
    """Yield those of the simulations."""
    record = recorded()
    for kind, (file, test) in SIMULATED.items():
        subject = subjects(ROOT / "tests" / "simulation" / f"{file}.py")
        in_each_run = importlib.import_module(f"tests.simulation.{test}").SEEDS
        for name in importlib.import_module(f"tests.simulation.{file}").MUTANTS:
            seeds = record[kind][name]  # None: more than were tried, so only `make nightly` is known to find it
            tier = "make test" if seeds and seeds <= in_each_run else "make nightly"
            number = "more than 300 seeds" if seeds is None else "1 seed" if seeds == 1 else f"{seeds} seeds"
            yield Mutant(subject[name], name.replace("_", " "), f"{number} of `{test}.py`, `{tier}`")


def tested_mutants() -> Iterator[Mutant]:
    """Yield those that a named test detects, in `make test`."""
    subject = subjects(ROOT / "tests" / "mutants.py")
    for name, (test, _) in importlib.import_module("tests.mutants").MUTANTS.items():
        yield Mutant(subject[name], name.replace("_", " "), f"`{test}`")
    faults = importlib.import_module("tests.local.test_faults")
    for name in faults.MUTANTS:
        yield Mutant("steps and saves", name, "`tests/local/test_faults.py::test_each_mutant_is_detected`")


def mutants_section() -> list[str]:
    """Return the last section of the page."""
    simulated, tested = [*simulated_mutants()], [*tested_mutants()]
    rows = [f"| {each.breaks} | {each.name} | {each.detected} |" for each in [*simulated, *tested]]
    return [
        "## Mutants",
        "",
        f"Each of {len(rows)} mutants breaks raysgd on purpose, in the way that its name says, and a test must fail. "
        f"{len(simulated)} break the simulation: the table has the number of seeds up to the first that fails. "
        f"{sum('make test' in each.detected for each in simulated)} of them would fail `make test`, which runs that many; the "
        "others need rare combinations of faults, for which `make nightly` runs up to 10,000 seeds. Each of the other "
        f"{len(tested)} fails the test in its row, in `make test`.",
        "",
        HEADS,
        "|---|---|---|",
        *rows,
        "",
    ]


def page(found: list[Group]) -> str:
    """Return the page."""
    from tools.wrap import filled_page

    number = {each.name: len(each.defects) for each in found}
    lines = [
        "# Track record",
        "",
        f"These {sum(number.values())} defects of results, data or safety were found and fixed before 0.1.0: "
        f"{number['simulation']} by simulation, {number['random']} by random scripts, {number['emulation']} by emulation, "
        f"{number['gpu']} on a GPU, {number['hosts']} by faults in real processes, {number['programs']} by programs of others, "
        f"{number['strangers']} by strangers, {number['attacks']} by attacks and damage, {number['reading']} by reading, "
        f"{number['users'] or 'none'} by users yet. Each row has the test that fails if its defect comes back.",
        "",
        "A row is a line of `docs/track_record.txt`, or of a table `FOUND` of [pinned "
        "schedules](simulation.md#reproduce-a-seed). What is known and not fixed is in the [changelog](changelog.md).",
        "",
    ]
    for group in filter(lambda each: each.defects, found):
        lines += [f"## {group.title}", "", "| whom it could affect | what was wrong | test |", "|---|---|---|"]
        lines += [f"| {each.who} | {each.wrong} | {each.shown} |" for each in group.defects]
        lines.append("")
    return filled_page("\n".join([*lines, *mutants_section()]))


def main(arguments: list[str]) -> str | None:
    sys.path.insert(0, str(ROOT))
    found = groups()
    if errors := [*wrong(found)]:
        return "\n".join(errors)
    if "--check" not in arguments:
        PAGE.write_text(page(found), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(found):
        return "docs/track_record.md is not that of its rows: run `python tools/track_record.py`"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

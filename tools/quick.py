"""Print the files of tests that are nearest to a change, as many as take about a minute. `make quick` runs them.

The change is what differs from a commit (by default HEAD, or the last commit if nothing differs). A file of tests is
near if few imports lead from it to a changed file. Its seconds are those of the last run of each test, in
`build/durations.json`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0
UNKNOWN_S = 5.0  # for a file of tests that no run has measured
# What almost every change can break, whatever it imports.
ALWAYS = ("tests/package/test_foreign.py", "tests/package/test_lazy_imports.py")


def changed(since: str) -> set[str]:
    """Return the paths of the Python files that differ from a commit, and those that git does not know yet."""
    commands = [["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"]]
    lines = [subprocess.check_output(["git", *each], cwd=ROOT, text=True).split("\n") for each in commands]
    return {line for part in lines for line in part if line.endswith(".py")}


@cache
def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


@cache
def imports(path: Path) -> dict[str, tuple[str, str]]:
    """Return what a file imports: for each name that it gets, the module and the name there ("" for a module)."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update({alias.name: (alias.name, "") for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found.update({alias.asname or alias.name: (base, alias.name) for alias in node.names})
    return found


def needed(path: Path) -> set[Path]:
    """Return the files that a file imports. A name of a package leads to the file from which the package has it."""
    files = set()
    for module, name in imports(path).values():
        found = file_of(f"{module}.{name}") or file_of(module)
        while name and found and found.name == "__init__.py" and name in imports(found):
            module, name = imports(found)[name]
            found = file_of(f"{module}.{name}") or file_of(module)
        files |= {found} - {None}
    return files  # type: ignore[return-value]


def distances(paths: set[str]) -> dict[str, int]:
    """Return for each file how many imports lead from it to one of the paths."""
    importers: dict[str, set[str]] = defaultdict(set)
    for folder in ("raysgd", "operators", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for each in needed(path):
                importers[str(each.relative_to(ROOT))].add(str(path.relative_to(ROOT)))
    found = dict.fromkeys(paths, 0)
    waiting = list(paths)
    for reached in waiting:
        new = importers[reached] - found.keys()
        found.update(dict.fromkeys(new, found[reached] + 1))
        waiting.extend(new)
    return found


def seconds() -> dict[str, float]:
    """Return the seconds of each file of tests, each test as its last run measured it."""
    record = ROOT / "build" / "durations.json"
    sums: dict[str, float] = defaultdict(float)
    for name, test in (json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}).items():
        sums[name.split("::")[0]] += test.get("setup", 0) + test.get("call", 0) + test.get("teardown", 0)
    return sums


def main() -> None:
    paths = changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD") or changed("HEAD^")
    found, measured = distances(paths), seconds()
    near = dict.fromkeys(ALWAYS, 0) | {path: far for path, far in found.items() if Path(path).name.startswith("test_")}
    chosen, total = [], 0.0
    for path in sorted(near, key=lambda path: (near[path], measured.get(path, UNKNOWN_S))):
        if (ROOT / path).is_file() and total + measured.get(path, UNKNOWN_S) <= LIMIT_S:
            chosen.append(path)
            total += measured.get(path, UNKNOWN_S)
    print(f"{len(paths)} files changed: {len(chosen)} of {len(near)} files of tests, {total:.0f} s", file=sys.stderr)
    print(*chosen)


if __name__ == "__main__":
    main()

"""Functions are short. A cohesive class, or a file about one subject, may be as long as it needs to be."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("raysgd", "operators", "examples", "tests")
FILES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {ROOT / "setup.py"})
LONGEST, LONGEST_IN_TESTS = 40, 60  # a test may hold a table


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of the body. Neither a docstring nor a signature that shows each argument counts."""
    first = node.body[0]
    lines = (node.end_lineno or first.lineno) - first.lineno + 1
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def too_long(path: Path) -> Iterator[str]:
    limit = LONGEST_IN_TESTS if path.is_relative_to(ROOT / "tests") else LONGEST
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_code(node) >= limit:
            yield f"{path}:{node.lineno} {node.name} has {lines_of_code(node)} lines; the limit is {limit}"


def test_modules_say_where_they_run() -> None:
    for package in ("callbacks", "core", "engine", "storage", "workers"):
        for path in sorted((ROOT / "raysgd" / package).glob("*.py")):
            first = path.read_text(encoding="utf-8").partition("\n")[0].removesuffix('"""')
            assert first.endswith(("Driver.", "Worker.", "Both.")), f"{path}: end the first line with where it runs"


def test_sizes() -> None:
    assert not [finding for path in FILES for finding in too_long(path)]

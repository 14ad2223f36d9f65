"""Functions are short, and files are not endless. A cohesive class may be as long as it needs to be."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("raysgd", "operators", "examples", "tests")
FILES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {ROOT / "setup.py"})
LONGEST_FUNCTION, LONGEST_FILE = 40, 600


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring: explaining is not held against anybody."""
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        whole -= first.end_lineno - first.lineno + 1
    return whole


def too_long(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if text.count("\n") >= LONGEST_FILE:
        yield f"{path}: has {text.count(chr(10))} lines; a file stays under {LONGEST_FILE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_code(node) >= LONGEST_FUNCTION:
            yield f"{path}:{node.lineno} {node.name} has {lines_of_code(node)} lines; the limit is {LONGEST_FUNCTION}"


def test_sizes() -> None:
    assert not [finding for path in FILES for finding in too_long(path)]

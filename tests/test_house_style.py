"""Small files, small classes, small functions: what must be read in one go, can be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("raysgd", "operators", "examples", "tests")
FILES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {ROOT / "setup.py"})
LIMITS = {ast.ClassDef: 300, ast.FunctionDef: 40, ast.AsyncFunctionDef: 40}


def lines_of_code(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring: explaining is not held against anybody."""
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        whole -= first.end_lineno - first.lineno + 1
    return whole


def too_long(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    length = text.count("\n")
    if length >= 400:
        yield f"{path.name} has {length} lines; a file stays under 400"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines, limit = lines_of_code(node), LIMITS[type(node)]
            if lines >= limit:
                yield f"{path.name}:{node.lineno} {node.name} has {lines} lines; the limit is {limit}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert not list(too_long(path))

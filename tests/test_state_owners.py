"""In the engine, each object is the only writer of its own state: other objects call its methods."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parent.parent / "raysgd" / "engine"
FILES = sorted(ENGINE.glob("*.py"))
CHANGING = {"append", "extend", "remove", "pop", "clear", "update", "add", "discard", "setdefault", "insert", "popleft"}

# The exceptions: the table writes its rows and the group's listener, and a recovery writes its own record.
ROWS = ("info.", "self._workers[worker].", "group.listener")
OWN = {"worker_table.py": ROWS, "recovery.py": ("case.",)}


def depth(node: ast.expr) -> int:
    """Return the number of attributes in an expression such as `self.a.b[c]`: 100 if it does not start with `self`, 0
    for a local variable."""
    attributes = 0
    while isinstance(node, ast.Attribute | ast.Subscript):
        attributes += isinstance(node, ast.Attribute)
        node = node.value
    own = isinstance(node, ast.Name) and node.id == "self"
    return attributes if own or not attributes else 100


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield each attribute or item that is assigned or deleted, or changed by a method of lists, sets and dicts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            yield node.func.value


def private_of_others(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if private and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node


def violations(source: str, own: tuple[str, ...] = ()) -> list[str]:
    tree = ast.parse(source)
    wrong = [*(target for target in written(tree) if depth(target) > 1), *private_of_others(tree)]
    return [text for node in wrong if not (text := ast.unparse(node)).startswith(own or ("\0",))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_the_owner_writes_its_state(path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), OWN.get(path.name, ()))


def test_the_documented_objects_are_classes_of_the_engine() -> None:
    page = (ENGINE.parent.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    table = page.partition("## The engine's objects")[2].partition("\n## ")[0]
    named = set(re.findall(r"(?m)^\| `(\w+)` \|", table))
    defined = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert named and named <= defined


@pytest.mark.parametrize(
    "source",
    ["other.up = True", "self._generation.up = False", "self._table.answers.remove(x)", "x = self._table._workers"],
)
def test_writing_the_state_of_another_object_is_detected(source: str) -> None:
    assert violations(source)
    assert not violations("self.up = True; self._replies.pop(1); found[2] = 3")

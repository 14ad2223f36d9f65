"""A file imports only files of lower layers, and those of its own layer that the table allows (docs/structure.md)."""

import ast
import sys
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = [p for p in (ROOT / "raysgd").rglob("*.py") if (ROOT / "raysgd" / "operators") not in p.parents]
FILES = sorted([*LIBRARY, *(ROOT / "operators").rglob("*.py")])

# The longest entry that matches a file decides its layer. The __init__ files of packages collect names for users, so no
# file of a lower layer may import them.
LAYERS = {
    "0": "errors config constants version core",
    "1a": "storage callbacks data ray_data/columns",
    "1b": "torch tf horovod train training",
    "2": "workers ray_data callbacks/ray_metrics",
    "3": "engine",
    "4": "torch/trainer torch/setup torch/strategies torch/checkpoint/save_load tf/trainer train/trainer train/executor "
    "train/iterator train/worker_group train/fit/run train/fit/trainer train/frameworks "
    "training/call_runner training/trainer_base tune",
    "5a": "__init__ callbacks/__init__ torch/__init__ tf/__init__ train/__init__ horovod/__init__ data/__init__ "
    "train/torch train/tensorflow train/horovod",
    "5b": "operators cli compat",
}
LAYER_OF = {unit: layer for layer, units in LAYERS.items() for unit in units.split()}

# Which imports are allowed within one layer, apart from those within one entry. All of layer 0 may import SHARED.
SHARED = {"errors", "config", "constants", "version"}
SIBLINGS = {
    "callbacks": {"storage"},
    "data": {"ray_data/columns"},
    "train": {"torch", "tf", "horovod"},
    "torch": {"training"},
    "tf": {"training"},
    "horovod": {"torch"},
    "ray_data": {"workers"},
    "workers": {"ray_data"},
    "train/executor": {"train/worker_group"},
    "train/iterator": {"train/executor"},
    "train/trainer": {"train/executor", "train/iterator", "train/worker_group", "tune"},
    "train/fit/run": {"train/executor", "train/iterator"},
    "train/fit/trainer": {"train/executor", "train/fit/run", "tune"},
    "train/frameworks": {"train/fit/trainer"},
    "tune": {"train/executor", "train/iterator", "tf/trainer", "torch/setup"},
    "torch/trainer": {
        "torch/checkpoint/save_load",
        "torch/setup",
        "torch/strategies",
        "training/call_runner",
        "training/trainer_base",
    },
    "tf/trainer": {"training/call_runner", "training/trainer_base"},
    "training/trainer_base": {"training/call_runner"},
}

# Where each package of other projects may be imported.
HOMES = {
    "ray": {"workers", "ray_data", "callbacks/ray_metrics", "tune", "compat"},
    "torch": {"torch", "horovod", "train", "operators", "compat/process_group"},
    "tensorflow": {"tf", "horovod", "train", "operators"},
    "keras": {"tf", "operators"},
    "horovod": {"horovod"},
}


def name_of(path: Path) -> str:
    """Return the name of a file: `torch/data/sources` for `raysgd/torch/data/sources.py`."""
    relative = path.relative_to(ROOT).with_suffix("")
    return "/".join(relative.parts if relative.parts[0] == "operators" else relative.parts[1:])


NAMES = {name_of(path) for path in FILES}


def entry_of(name: str) -> str:
    """Return the longest entry of the table that matches this file."""
    covering = [unit for unit in LAYER_OF if name == unit or name.startswith(unit + "/")]
    assert covering, f"{name}.py is in no layer: add it here and in docs/structure.md"
    return max(covering, key=len)


def target(module: str) -> str:
    """Return the name of a module's file: `torch/operator`, or `torch/__init__` for `raysgd.torch`."""
    name = "/".join(module.split(".")[1:])
    return name if name in NAMES else f"{name}/__init__".lstrip("/")


def only_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path) -> set[str]:
    """Return the names of the modules that the file imports, also in functions, except for those for type checkers
    only."""
    package = ".".join(["raysgd", *name_of(path).split("/")[:-1]])
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if base.startswith("raysgd") and target(name) in NAMES}
            found |= modules if modules == inner else modules | {base}
        todo.extend(node.orelse if only_for_types(node) else ast.iter_child_nodes(node))
    return found


def inside(path: Path) -> set[str]:
    return {target(module) for module in imports(path) if module.split(".")[0] == "raysgd"} - {name_of(path)}


def may_import(importer: str, imported: str) -> bool:
    upper, lower = entry_of(importer), entry_of(imported)
    if LAYER_OF[upper] != LAYER_OF[lower]:
        return LAYER_OF[upper] > LAYER_OF[lower]
    return upper == lower or lower in SHARED or lower in SIBLINGS.get(upper, set())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    wrong = sorted(name for name in inside(path) if not may_import(name_of(path), name))
    assert not wrong, f"{name_of(path)} (layer {LAYER_OF[entry_of(name_of(path))]}) must not import {wrong}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_other_packages_are_imported_only_where_the_table_allows(path: Path) -> None:
    name = name_of(path)
    outside = {module.split(".")[0] for module in imports(path)} - {"raysgd"}
    away = sorted(p for p in outside if p in HOMES and not any(f"{name}/".startswith(f"{home}/") for home in HOMES[p]))
    assert not away, f"{name_of(path)} must not import {away}; only these may: {[HOMES[p] for p in away]}"
    if LAYER_OF[entry_of(name_of(path))] == "0":
        assert outside <= sys.stdlib_module_names, f"layer 0 may import only the standard library: {name_of(path)}"


def test_no_import_cycles() -> None:
    """Cycles are not allowed between files of one layer either."""
    graph = {name_of(path): {n for n in inside(path) if not n.endswith("__init__")} for path in FILES}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle

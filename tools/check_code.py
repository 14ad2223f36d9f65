"""Check how the code is built: `python tools/check_code.py`, a part of `make check`.

A file imports only files of lower layers, and those of its own layer that the tables below allow (docs/structure.md), and
names no others as text. Other packages are imported only in their homes, and their private names are used only in files
named foreign.py. Functions are short. A cohesive class, or a file about one subject, may be as long as it needs to be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = [p for p in (ROOT / "raysgd").rglob("*.py") if (ROOT / "raysgd" / "operators") not in p.parents]
FILES = sorted([*LIBRARY, *(ROOT / "operators").rglob("*.py")])

# The longest entry that matches a file decides its layer. The __init__ files of packages collect names for users, so no
# file of a lower layer may import them.
LAYERS = {
    "0": "errors config environment constants version core",
    "1a": "storage callbacks data ray_data",
    "1b": "torch tf horovod train replica data/sample_seeds",
    "2": "workers",
    "3": "engine",
    "4": "trainer torch/trainer torch/setup torch/group/strategies torch/state/sharded tf/trainer train/run train/fit tune "
    "horovod/strategy",
    "5a": "__init__ callbacks/__init__ torch/__init__ tf/__init__ train/__init__ horovod/__init__ data/__init__ "
    "train/torch train/tensorflow train/lightning",
    "5b": "operators cli compat demo",
}
LAYER_OF = {unit: layer for layer, units in LAYERS.items() for unit in units.split()}

# Which imports are allowed within one layer, apart from those within one entry. All of layer 0 may import SHARED.
SHARED = {"errors", "config", "environment", "constants", "version"}
SIBLINGS = {
    "callbacks": {"storage"},
    "data": {"ray_data"},
    "train": {"horovod", "tf", "torch", "replica"},
    "data/sample_seeds": {"replica"},
    "torch": {"data/sample_seeds", "replica"},
    "tf": {"replica"},
    "horovod": {"torch"},
    "horovod/strategy": {"torch/group/strategies"},
    "train/run": {"trainer"},
    "train/fit": {"trainer", "train/run"},
    "train/lightning": {"train/torch"},
    "tune": {"train/run", "tf/trainer", "torch/setup"},
    "torch/trainer": {"torch/state/sharded", "torch/setup", "torch/group/strategies", "trainer"},
    "torch/setup": {"trainer"},
    "torch/state/sharded": {"trainer"},
    "tf/trainer": {"trainer"},
}


# Files that name one as text which they must not import, to load it when it is used, and why.
UPWARD = {
    ("__init__", "compat/import_paths"): "finds the modules of older libraries when a script imports them",
    ("core/lazy", "compat/refused"): "knows the home of the names that raise an error",
    ("core/offers", "horovod/strategy"): "TorchTrainer(backend='horovod'): Horovod's strategy uses those of torch",
    ("core/offers", "torch/creators"): "TrainingOperator.from_creators makes a subclass",
    ("core/offers", "torch/lightning/operator"): "TrainingOperator.from_ptl makes a subclass",
    ("core/offers", "tune/trials"): "TorchTrainer.as_trainable makes a trial of Tune",
    ("train/checkpoint", "compat/without_effect"): "has an older name",
    ("train/checkpoint", "train/run/checkpoint_manager"): "has an older name",
    ("replica/operator_base", "torch/operator"): "asks whether a method is a default one of raysgd",
}

# Where each package of other projects may be imported.
HOMES = {
    "ray": {"workers", "ray_data", "train/run/trials", "tune", "compat", "cli/doctor"},
    "torch": {"torch", "horovod", "train", "operators", "data/sample_seeds", "compat/torch_functions", "demo"},
    "tensorflow": {"tf", "horovod", "train", "operators"},
    "keras": {"tf", "operators"},
    "horovod": {"horovod"},
}

RUNS_SOMEWHERE = ("callbacks", "core", "engine", "storage", "workers")  # the first line of each file says where
OTHERS = [path for folder in ("examples", "tests") for path in (ROOT / folder).rglob("*.py")]
LONGEST, LONGEST_IN_TESTS = 40, 60  # a test may hold a table
# Names that begin with an underscore although they are not private: Python's own, and those that fsspec documents for its
# file systems. (The names in a checkpoint's pickle are strings: they are part of the file format.)
NOT_PRIVATE = {
    *("_Unpickler", "_asdict", "_current_frames", "_exit", "_fields", "_make", "_replace"),
    *("_parent", "_strip_protocol"),
}
PRIVATE_PACKAGES = ("tensorflow.python", "keras.src")


def name_of(path: Path) -> str:
    """Return the name of a file: `torch/data/sources` for `raysgd/torch/data/sources.py`."""
    relative = path.relative_to(ROOT).with_suffix("")
    return "/".join(relative.parts if relative.parts[0] == "operators" else relative.parts[1:])


NAMES = {name_of(path) for path in FILES}


def target(module: str) -> str:
    """Return the name of a module's file: `torch/operator`, or `torch/__init__` for `raysgd.torch`."""
    name = "/".join(module.split(".")[1:])
    return name if name in NAMES else f"{name}/__init__".lstrip("/")


def imports_of(path: Path, *, types: bool = False) -> tuple[set[str], set[str]]:
    """Return the names of the library's files that a file imports, and of other packages. Imports in functions count, and
    with `types` those for type checkers only."""
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
        only_for_types = not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        todo.extend(node.orelse if isinstance(node, ast.If) and only_for_types else ast.iter_child_nodes(node))
    inside = {target(module) for module in found if module.split(".")[0] == "raysgd"}
    return inside - {name_of(path)}, {module.split(".")[0] for module in found} - {"raysgd"}


def named_in(path: Path) -> set[str]:
    """Return the names of the library's files that a file has as text: "raysgd.torch.creators", or "...:name"."""
    texts = {
        node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    }
    found = {re.fullmatch(r"(raysgd(?:\.\w+)+)(?::\w+)?", text) for text in texts if isinstance(text, str)}
    return {target(each[1]) for each in found if each is not None} & NAMES - {name_of(path)}


def entry_of(name: str) -> str:
    """Return the longest entry of the table that matches this file."""
    return max((unit for unit in LAYER_OF if name == unit or name.startswith(unit + "/")), key=len, default="")


def may_import(importer: str, imported: str) -> bool:
    upper, lower = entry_of(importer), entry_of(imported)
    if LAYER_OF[upper] != LAYER_OF[lower]:
        return LAYER_OF[upper] > LAYER_OF[lower]
    return upper == lower or lower in SHARED or lower in SIBLINGS.get(upper, set())


def wrong_imports(path: Path) -> Iterator[str]:
    name = name_of(path)
    layer = LAYER_OF[entry_of(name)]
    inside, outside = imports_of(path)
    yield from (f"layer {layer} must not import {other}" for other in inside if not may_import(name, other))
    named = {other: LAYER_OF[entry_of(other)] for other in named_in(path)}
    upward = {other for other in named if named[other] > layer or (layer < "5" and not may_import(name, other))}
    allowed = {imported for importer, imported in UPWARD if importer == name}
    yield from (
        f"layer {layer} must not name {other}; or add it to UPWARD, with a reason" for other in upward - allowed
    )
    yield from (f"it does not name {other} any more: remove it from UPWARD" for other in allowed - upward)
    for package in outside & HOMES.keys():
        if not any(f"{name}/".startswith(f"{home}/") for home in HOMES[package]):
            yield f"only {sorted(HOMES[package])} may import {package}"
    if layer == "0" and (others := outside - sys.stdlib_module_names):
        yield f"layer 0 must not import {sorted(others)}, only the standard library"


def folder_of(name: str) -> str:
    """Return the folder of a file: `train/fit`, but `torch` for those in `torch/data`, which use the files beside them."""
    return "torch" if name.startswith("torch/") else name.rpartition("/")[0] or name


def cycles() -> Iterator[str]:
    """Imports in functions count, and those for types, but not the `__init__` files, which collect names for users."""
    named = {name_of(path): imports_of(path, types=True)[0] for path in FILES if path.name != "__init__.py"}
    files = {name: {each for each in others if not each.endswith("__init__")} for name, others in named.items()}
    folders: dict[str, set[str]] = {}
    for name, others in files.items():
        folder = folder_of(name)
        folders.setdefault(folder, set()).update({folder_of(each) for each in others} - {folder})
    for kind, graph in (("files", files), ("folders", folders)):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"these {kind} import each other in a circle: {' <- '.join(error.args[1])}"


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr


def private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that a file uses, with their lines: attributes, imports, and names in `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("raysgd", "__future__")):
            module = node.module or ""
            names = [*module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
            if module.startswith(PRIVATE_PACKAGES):
                yield node.lineno, module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            if is_private(name):
                yield node.lineno, str(name)


def foreign_names() -> Iterator[str]:
    """Private names of other libraries are used in one file for each framework."""
    parsed = {path: ast.parse(path.read_text(encoding="utf-8")) for path in LIBRARY}
    own = NOT_PRIVATE.union(*map(defined, parsed.values()))
    for path, tree in sorted(parsed.items()):
        if path.name != "foreign.py":
            wrong = sorted(each for each in private(tree) if each[1] not in own)
            yield from (f"{path}: line {line}: use {name} in the package's foreign.py" for line, name in wrong)


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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := lines_of_code(node)) >= limit:
            yield f"line {node.lineno}: {node.name} has {lines} lines; the limit is {limit}"


def findings() -> Iterator[str]:
    homeless = [path for path in FILES if not entry_of(name_of(path))]
    yield from (f"{path}: in no layer; add it to {Path(__file__).name} and docs/structure.md" for path in homeless)
    for path in FILES if not homeless else ():
        yield from (f"{path}: {wrong}" for wrong in wrong_imports(path))
    yield from cycles()
    yield from foreign_names()
    for path in [*FILES, *OTHERS]:
        yield from (f"{path}: {wrong}" for wrong in too_long(path))
    for path in sorted(path for package in RUNS_SOMEWHERE for path in (ROOT / "raysgd" / package).rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if not docstring.partition("\n\n")[0].endswith(("Driver.", "Worker.", "Both.")):
            yield f"{path}: end the first paragraph with where it runs: Driver., Worker. or Both."


if __name__ == "__main__":
    sys.exit("\n".join(findings()) or None)

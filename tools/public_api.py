"""List the public API, names and signatures, one per line: `python tools/public_api.py` writes tests/public_api.txt.

`tests/package/test_public_names.py` compares it with the code, so a change of the API is a line in the diff of a commit. Types are left
out, because Python versions write them differently; mypy checks them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "public_api.txt"
PACKAGES = (
    *("raysgd", "raysgd.callbacks", "raysgd.data", "raysgd.tf", "raysgd.torch", "raysgd.tune"),
    *("raysgd.train", "raysgd.train.callbacks", "raysgd.train.huggingface.transformers", "raysgd.train.lightning"),
    "raysgd.train.torch",
)


def signature(of: Any) -> str:
    """Return the arguments as text, with their defaults and without their types."""
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        each.replace(annotation=inspect.Parameter.empty, default=default(each.default))
        for name, each in found.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(inspect.Signature(plain))


class Text(str):
    """Shows itself without quotes, as a default does in a signature."""

    def __repr__(self) -> str:
        return str(self)


def default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    text = getattr(value, "__qualname__", None) or repr(value)
    return Text("..." if " at 0x" in text else text)


def members(of: type) -> set[str]:
    """Return the public methods and properties that raysgd adds, of a class and its bases. An override of a name that another
    library defines is none."""
    found = set()
    settings = set(getattr(of, "__dataclass_fields__", ()))  # which its signature shows
    for name in {each for each in dir(of) if not each.startswith("_")} - settings:
        static = inspect.getattr_static(of, name)
        if all(base.__module__.startswith("raysgd") for base in of.__mro__ if name in vars(base)):
            function = getattr(static, "__func__", static)
            found.add(f"    .{name}{signature(function) if inspect.isfunction(function) else ''}")
    return found


def entry(full: str, of: Any, known: dict[int, str]) -> Iterator[str]:
    """Yield the lines of one name."""
    if (callable(of) or inspect.ismodule(of)) and (first := known.setdefault(id(of), full)) != full:
        yield f"{full} is {first}"
    elif not inspect.isclass(of):
        yield full + (signature(of) if inspect.isfunction(of) else "")
    elif issubclass(of, BaseException) or not of.__module__.startswith("raysgd"):
        yield full
    else:
        base = next((each for each in of.__mro__[1:] if id(each) in known), None)
        yield f"{full}{signature(of)}{f', a {known[id(base)]}' if base else ''}"
        yield from sorted(members(of) - (members(base) if base else set()))


def listed() -> str:
    """Return all of the API, as the file has it."""
    modules = [(package, importlib.import_module(package)) for package in PACKAGES]
    names = [
        (f"{package}.{name}", getattr(module, name))
        for package, module in modules
        for name in sorted({*module.__all__, *(["TFTrainer"] if package == "raysgd" else [])})
        if not name.startswith("_")
    ]
    known: dict[int, str] = {}
    for full, of in names:
        known.setdefault(id(of), full)
    return "\n".join(line for full, of in names for line in entry(full, of, known)) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    FILE.write_text(listed(), encoding="utf-8")

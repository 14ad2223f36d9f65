"""Names of a package that are loaded when they are first used. Both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["FRAMEWORKS", "lazy_names", "load"]

FRAMEWORKS = ("torch", "tensorflow")  # each is also the name of the extra that installs it


def load(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return a name of a package from the module where it is defined. Raise ImportError with the extra to install if that
    module needs a framework that is missing."""
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_module(homes[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in FRAMEWORKS:
            raise
        raise ImportError(f"{package}.{name} needs {missing}: pip install 'raysgd[{missing}]'") from error


def lazy_names(
    package: str, homes: Mapping[str, str], listed: Sequence[str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package with such names. `listed` is its `__all__`."""
    return lambda name: load(package, name, homes), lambda: sorted(listed or homes)

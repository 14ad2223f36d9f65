"""Names of a package that are loaded when first used, and modules for old import paths. Both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FRAMEWORKS = ("torch", "tensorflow")  # each is also the name of the extra that installs it
REFUSED = "raysgd.compat.refused"  # the home of names that raysgd does not have: it raises an ImportError that says why


def load(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Load a name of a package from its home: "module", or "module:name" if it has another name
    there, or the path of a module of the package. Raise ImportError with the extra to install if
    that module needs a framework that is missing."""
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home, _, there = homes[name].partition(":")
    try:
        module = import_module(home)
        return module if home == f"{package}.{name}" else getattr(module, there or name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in FRAMEWORKS:
            raise
        raise ImportError(f"{package}.{name} needs {missing}: pip install 'raysgd[{missing}]'") from error


def lazy_names(
    package: str, homes: Mapping[str, str], listed: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package with such names, and `listed` ones."""
    return lambda name: load(package, name, homes), lambda: sorted({*listed, *offered(homes)})


def offered(homes: Mapping[str, str]) -> list[str]:
    """The names that an import gets."""
    return sorted(name for name, home in homes.items() if not home.startswith(REFUSED))


class OldModules(MetaPathFinder, Loader):
    """Creates the modules of a table, which is in the module of this name. It comes last on
    `sys.meta_path`, so the table is read only when Python finds no file for a module of raysgd."""

    def __init__(self, table: str) -> None:
        self._table = table

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        modules = import_module(self._table).MODULES if fullname.startswith("raysgd.") else ()
        if fullname not in modules:
            return None
        has_submodules = any(other.startswith(f"{fullname}.") for other in modules)
        return ModuleSpec(fullname, self, origin=self._table, is_package=has_submodules)

    def exec_module(self, module: ModuleType) -> None:
        homes: dict[str, str] = import_module(self._table).homes_of(module.__name__)
        names: dict[str, Any] = {"__doc__": f"The names of `{module.__name__}`.", "__all__": offered(homes)}
        names["__getattr__"], names["__dir__"] = lazy_names(module.__name__, homes)
        module.__dict__.update(names)

"""Pickle user code by value, so that it works on nodes that do not have its file. Driver.

The code can be in a notebook, in `__main__` or in a module beside the script.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from raysgd.environment import is_installed
from raysgd.errors import shown
from raysgd.workers.calls import PickledObject

# cloudpickle has one list of the modules to pickle by value per process: one thread at a time may change it. It has a module for
# one object only, because cloudpickle includes the modules of a package that it has.
_REGISTERING = threading.RLock()
UNPICKLABLE = (TypeError, pickle.PickleError, AttributeError)  # torch raises the base class for its script functions


def pack(value: Any) -> PickledObject | None:
    """Pickle the user's object as bytes that any node can read.

    Functions and classes of modules that are not installed (files beside the script) are pickled
    with their content, so that a worker that starts later has what the script has, although a file
    was edited meanwhile. Modules with a variable that cannot be pickled are left out: workers
    import these, because they get the files, too. Raise a TypeError that names the object if
    something in it cannot be pickled."""
    if value is None:
        return None
    imported: set[str] = set()
    while True:
        contained: set[str] = set()
        try:
            return PickledObject(dumps(value, contained=contained, imported=imported))
        except UNPICKLABLE as error:
            more = {name for name in contained if find_unpicklable_variable(sys.modules[name])}
            if not more:
                raise TypeError(
                    f"{value!r} cannot be sent to the workers: {_find_culprit(value)}{error}. Create such objects (locks, files, "
                    "connections, loaders with running processes) inside `setup`, which runs on each worker, and pass only plain "
                    "values"
                ) from error
            imported |= more


def find_unpicklable_variable(module: ModuleType) -> str:
    """Find the name of a variable of a module that cannot be pickled, or ""."""
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            parts = {f"{name}.{part}": each for part, each in vars(value).items()}
        else:
            parts = {name: value}
        for full_name, part in parts.items():
            if full_name.rpartition(".")[2].startswith("__") or isinstance(part, (ModuleType, FunctionType, type)):
                continue
            try:
                dumps(part)
            except Exception:  # the user's objects may raise anything
                return full_name
    return ""


def _find_culprit(value: Any) -> str:
    """Find which attribute of the object, and which key of a dictionary in it, cannot be pickled;
    or else which variable of the script or notebook."""
    for name, part in getattr(value, "__dict__", {}).items():
        items = part.items() if isinstance(part, Mapping) else [("", part)]
        for key, each in items:
            try:
                dumps(each)
            except Exception:  # the user's objects may raise anything
                return (
                    f"{name}[{key!r}] is {shown(each)}. " if isinstance(part, Mapping) else f"{name} is {shown(part)}. "
                )
    variable = find_unpicklable_variable(sys.modules["__main__"])
    return f"the variable {variable} of the script is one that cannot be pickled. " if variable else ""


def dumps(value: Any, protocol: int | None = None, buffer_callback: Any = None, **settings: Any) -> bytes:
    """Pickle with cloudpickle. All modules but the script are pickled by name, also those with a
    class of their own, as torch's config modules, which cloudpickle includes and cannot pickle."""
    buffer = io.BytesIO()
    pickler = pickler_class()(buffer, protocol, buffer_callback)
    vars(pickler).update(settings)
    pickler.dump(value)
    return buffer.getvalue()


@lru_cache(maxsize=1)
def pickler_class() -> Any:
    from ray import cloudpickle

    base: Any = cloudpickle.CloudPickler

    class Pickler(base):  # type: ignore[misc]
        contained: set[str] | None = None  # the modules that were pickled with their content, if any may be
        imported: Set[str] = frozenset()  # those that may not

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return import_module, (obj.__name__,)
            if not isinstance(obj, (FunctionType, type, ModuleType, TypeVar)):
                return base.reducer_override(self, obj)
            with _by_value(self._sent(obj)):
                if isinstance(obj, (ModuleType, TypeVar)):
                    return self.dispatch_table[type(obj)](obj)
                return base.reducer_override(self, obj)

        def _sent(self, obj: Any) -> ModuleType | None:
            """The module of an object that is to be pickled with its content."""
            name = obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            if self.contained is None or module is None or name in self.imported or not _is_local(module):
                return None
            self.contained.add(module.__name__)
            return module

    return Pickler


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Let cloudpickle pickle one object of this module with its content."""
    from ray import cloudpickle

    with _REGISTERING:
        if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():  # by the user
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: ModuleType) -> bool:
    """Whether a module is the user's own: neither built in nor installed nor raysgd's."""
    name = getattr(module, "__name__", "")
    if not isinstance(module, ModuleType) or name == "__main__" or name.partition(".")[0] == "raysgd":
        return False
    if sys.modules.get(name) is not module:
        return False
    file = getattr(module, "__file__", None)
    if file is None:  # a folder without __init__.py
        folders = [str(folder) for folder in getattr(module, "__path__", ())]
        return bool(folders) and not any(is_installed(folder) for folder in folders)
    return str(file).endswith(".py") and not is_installed(str(file))

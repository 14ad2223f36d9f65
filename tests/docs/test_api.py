"""Each public class has a page in the API reference, and each argument that a page shows is described in a docstring."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PACKAGES = ("raysgd", "raysgd.train", "raysgd.train.torch", "raysgd.callbacks", "raysgd.data", "raysgd.tune")
# Older names for a class that has a page, and what Tune calls.
# raysgd or Tune creates these, so users do not pass the arguments of their constructors.
NOT_CREATED = {
    "TrainingOperator",
    "CreatorOperator",
    "TrainingIterator",
    "ElasticState",
    "TrainContext",
    "ElasticLoader",
}
NOT_CREATED |= {"BaseTorchTrainable", "TFTrainable"}
NO_PAGE = {"SGDCallback", "SGDIterator", "FunctionTrial", "DistributedTrainable"}


def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


CONF = conf()


def found(name: str) -> Any:
    """Return a public object, or skip the test without the framework that it needs."""
    package, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(package), last, None) or importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported here: {error}")


def methods(of: type, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that the page of a class shows."""
    options = CONF.shown_methods(name)
    if not options:
        return
    named = re.findall(r"\w+", options.partition(":members:")[2].partition("\n")[0])
    for method in named or [each for each in dir(of) if not each.startswith("_")]:
        static = inspect.getattr_static(of, method)
        function = getattr(static, "__func__", static)
        if inspect.isfunction(function) and function.__module__.startswith("raysgd"):
            yield method, function


def callables(name: str, of: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what has arguments on a page: where, its signature, and the docstring that describes them."""
    if inspect.ismodule(of):
        errors = any(isinstance(each, type) and issubclass(each, Exception) for each in vars(of).values())
        for each in of.__all__:
            if each not in CONF.PUBLIC_LAST and not errors:
                yield from callables(f"{name}.{each}", getattr(of, each))
    elif inspect.isclass(of):
        if not issubclass(of, BaseException):
            bases = " ".join(inspect.getdoc(base) or "" for base in of.__mro__[:-1] if base.__init__ is of.__init__)
            made = (lambda: None) if of.__name__ in NOT_CREATED else of.__init__
            yield name, inspect.signature(made), f"{inspect.getdoc(of)}\n{bases}"
        for method, function in methods(of, name):
            yield f"{name}.{method}", inspect.signature(function), inspect.getdoc(function) or ""
    elif callable(of):
        yield name, inspect.signature(of), inspect.getdoc(of) or ""


def undescribed(signature: inspect.Signature, docstring: str) -> list[str]:
    """Return the arguments that are neither in a table of the docstring nor in backticks."""
    quoted = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", docstring))))
    rows = filter(None, map(CONF.ROW.fullmatch, docstring.splitlines()))
    described = quoted | {name for row in rows for name in row[1].split(", ")}
    catch_all = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, each in signature.parameters.items() if each.kind not in catch_all]
    return [
        name for name in names if name not in ("self", "cls") and not name.startswith("_") and name not in described
    ]


@pytest.mark.parametrize("name", CONF.PUBLIC)
def test_arguments_are_described(name: str) -> None:
    wrong = {
        where: undescribed(signature, text) or "it has no docstring"
        for where, signature, text in callables(name, found(name))
        if undescribed(signature, text) or not text
    }
    assert not wrong, f"arguments without a description: {wrong}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_classes_have_a_page(package: str) -> None:
    module = importlib.import_module(package)
    pages = {each.rpartition(".")[2] for each in CONF.PUBLIC}
    public = {name for name in module.__all__ if inspect.isclass(getattr(module, name))}
    in_modules = {name for each in CONF.PUBLIC for name in getattr(found(each), "__all__", ())}
    missing = {
        name for name in public - pages - in_modules - NO_PAGE if not issubclass(getattr(module, name), Exception)
    }
    assert not missing, f"docs/api.md does not list {sorted(missing)}"


def test_undescribed_arguments_are_found() -> None:
    def call(first: int, second: int, third: int, fourth: int, **others: int) -> None:
        """Return `first` of what is the second.

        third, fourth  a number
                       with more text
        """

    assert undescribed(inspect.signature(call), inspect.getdoc(call) or "") == ["second"]

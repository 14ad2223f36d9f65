"""Public names, and those of older modules, can be imported. The pages for migrating say what each does (tests/docs)."""

import importlib
from collections.abc import Iterator

import pytest

from raysgd.compat import MODULES

PACKAGES = [
    "raysgd",
    *(
        f"raysgd.{each}"
        for each in ["callbacks", "data", "tf", "torch", "train", "train.callbacks", "train.torch", "tune"]
    ),
]


def problem(module: str, name: str) -> str:
    """Return why a name cannot be imported; "" if it can, or if the error says which extra to install."""
    try:
        getattr(importlib.import_module(module), name)
    except ImportError as error:
        return "" if isinstance(error.__cause__, ImportError) and "raysgd[" in str(error) else f"{error!r}"
    except AttributeError as error:
        return f"{error!r}"
    return ""


def problems(module: str) -> Iterator[str]:
    if found := problem(module, "__all__"):
        yield f"{module}: {found}"
        return
    try:
        of = importlib.import_module(module)
    except ImportError:  # its framework is not installed
        return
    for name in of.__all__:
        if found := problem(module, name) or ("" if name in dir(of) else "dir() does not show it"):
            yield f"{module}.{name}: {found}"
    if len(set(of.__all__)) != len(of.__all__):
        yield f"{module} has a name twice"


@pytest.mark.filterwarnings("ignore:.* has no effect in raysgd")
def test_public_and_older_names_can_be_imported() -> None:
    found = [each for module in [*PACKAGES, *MODULES] for each in problems(module)]
    assert not found, "\n".join(found)

"""Public names, and those of older modules, can be imported. The pages for migrating say what each does (tests/docs)."""

import difflib
import importlib
from collections.abc import Iterator

import pytest

from raysgd.compat.import_paths import MODULES
from tools.public_api import FILE, PACKAGES, listed


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
def test_public_and_older_names_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which the import of Lightning sets
    pytest.importorskip("lightning")
    found = [each for module in [*PACKAGES, *MODULES] for each in problems(module)]
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:.* has no effect in raysgd")
def test_the_api_is_the_one_that_is_written_down() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("lightning")
    found = "\n".join(difflib.unified_diff(FILE.read_text(encoding="utf-8").splitlines(), listed().splitlines(), n=0))
    assert not found, f"the public API has changed; if it should, run `python tools/public_api.py`:\n{found}"

"""Examples in docstrings that look like a session of the interpreter are one."""

import doctest
import importlib
from pathlib import Path

import pytest

import raysgd

ROOT = Path(raysgd.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if "\n    >>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings(path: Path) -> None:
    module = importlib.import_module(".".join(["raysgd", *path.relative_to(ROOT).with_suffix("").parts]))
    failed, tried = doctest.testmod(module)
    assert tried and not failed

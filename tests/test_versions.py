"""The supported versions of Python, torch and Ray are tested at both ends in `make nightly`. tools/check_pages.py checks that they
are stated alike everywhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "try_versions.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_versions", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_interpreter_is_named(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_3_99", sys.executable)  # another version than its name says
    with pytest.raises(OSError, match=r"Python 3\.99 was not found.*PYTHON_3_99"):
        tool.interpreter("3.99")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setenv(f"PYTHON_{version.replace('.', '_')}", sys.executable)
    assert tool.interpreter(version) == sys.executable


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_the_ends_of_the_supported_range(name: str) -> None:
    done = subprocess.run([sys.executable, str(TOOL), name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

"""The supported versions of Python, torch and Ray: stated alike everywhere, and tested at both ends in `make nightly`."""

from __future__ import annotations

import importlib.util
import re
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


def test_setup_and_documentation_state_the_tested_versions(tool: ModuleType) -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    oldest, newest = tool.COMBINATIONS["oldest"], tool.COMBINATIONS["newest"]
    assert f'python_requires=">={oldest.python}"' in setup
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)[-1] == newest.python
    assert f"Python {oldest.python} to {newest.python}" in page
    for package, name in (("torch", "PyTorch"), ("ray", "Ray")):
        (minimum,) = (each.split("==")[1] for each in oldest.packages if each.startswith(f"{package}=="))
        required = re.findall(rf'"{package}(?:\[data\])?>=([\d.]+)"', setup)
        assert set(required) == {minimum.removesuffix(".0")}
        assert f"{name} {minimum.removesuffix('.0')} or newer" in page
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for package in ("torch", "ray"):
        assert re.search(rf"^{package}==", pinned, flags=re.MULTILINE)


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

"""The wheel holds the library and the operators, each file once, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "raysgd", "operators")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline, in a copy: the checkout's own build folder must neither be used nor left behind. `make release` names its
    own."""
    if named := os.environ.get("RAYSGD_WHEEL"):
        return Path(named)
    pytest.importorskip("setuptools")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    bytecode = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=bytecode)
        else:
            shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(out)], cwd=tree, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("raysgd-*.whl")
    return built


def expected() -> set[str]:
    """Every Python file of the two folders, under the name it is imported by."""
    library = [p for p in (ROOT / "raysgd").rglob("*.py") if ROOT / "raysgd" / "operators" not in p.parents]
    operators = (ROOT / "operators").rglob("*.py")
    names = {str(p.relative_to(ROOT)) for p in library} | {f"raysgd/{p.relative_to(ROOT)}" for p in operators}
    return names | {"raysgd/py.typed"}


def test_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    names = Counter(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == expected()
    assert "raysgd/operators/__init__.py" in packaged
    assert max(names.values()) == 1


def test_links_of_the_readme_lead_to_the_web(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    links = re.findall(r"\]\(([^)]*)\)|(?:src|srcset)=\"([^\"]*)\"", archive.read(name).decode())
    assert len(links) > 20 and all("".join(link).startswith("https://") for link in links)


def test_operators_have_one_name_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import operators"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "its only name is 'raysgd.operators'" in done.stderr
    assert (ROOT / "raysgd" / "operators").readlink() == Path("../operators")

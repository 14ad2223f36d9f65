"""The lines that the first pages print run in a fresh environment, in a clone: the installation, the demo, and the first example."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/getting_started.md", "docs/index.md")
ASK = """
    def module_file():
        import raysgd
        return raysgd.__file__

    print("IMPORTED", module_file(), *trainer.apply_all_workers(module_file))
"""


def lines(page: str) -> list[str]:
    """Return the installations of a page."""
    return re.findall(r"(?m)^pip install .*", (ROOT / page).read_text(encoding="utf-8"))


def printed(*command: str | Path, folder: Path, **extra: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | extra
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.more
@pytest.mark.timeout(1500)
def test_the_lines_of_the_first_pages(tmp_path: Path) -> None:
    """torch's version is that of the tests, so that their smaller build is installed where they have it."""
    clone, fresh, home = tmp_path / "clone", tmp_path / "fresh", tmp_path / "home"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "_build", "*.egg-info"))
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    home.mkdir()
    (tmp_path / "constraints").write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
    shell = {
        "PATH": f"{fresh / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(tmp_path / "constraints"),
    }
    for line in sorted({line for page in PAGES for line in lines(page)}):
        printed("bash", "-c", line, folder=clone, **shell)
    assert "samples in that epoch: 1437 of 1437" in printed(
        fresh / "bin/python", "-m", "raysgd.demo", "--smoke", folder=home
    )
    example = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (home / "example.py").write_text(example + ASK, encoding="utf-8")
    output = printed(fresh / "bin/python", "example.py", folder=home)
    (imported,) = [line.split()[1:] for line in output.splitlines() if line.startswith("IMPORTED")]
    assert len(imported) == 3 and all(each.startswith(f"{fresh}/lib") for each in imported)
    assert "epoch 3: loss" in output and (home / "digits.pt").stat().st_size > 10_000

"""`import raysgd` needs no framework and no Ray; what does need one says which extra to install."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "tensorflow", "horovod", "ray")

# Runs before the tested lines: each of the named packages is as if it were not installed.
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script = BLOCK.format(blocked=blocked) + code
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_importing_raysgd_loads_nothing_heavy() -> None:
    done = run(f"import raysgd, raysgd.data, raysgd.utils; print(sorted(set({HEAVY}) & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_trainers_load_no_old_names_and_star_imports_no_tensorflow() -> None:
    """Old modules are created from a table in `raysgd.compat.import_paths`. A star gives the names for PyTorch; TFTrainer is
    imported by its
    name."""
    code = "import sys, raysgd, raysgd.train\nraysgd.TorchTrainer, raysgd.train.Trainer\n"
    code += "print([name for name in sys.modules if name.startswith('raysgd.compat')])\n"
    code += "".join(f"from raysgd{package} import *\n" for package in ("", ".torch", ".train", ".callbacks"))
    code += "print([each for each in ('tensorflow', 'keras') if each in sys.modules])\n"
    done = run(code + "print(TorchTrainer and 'TFTrainer' in dir(raysgd))")
    assert done.stdout.splitlines() == ["[]", "[]", "True"], done.stdout + done.stderr


def test_all_modules_can_be_listed_without_optional_packages() -> None:
    """A module that needs a package that is not installed raises ImportError, which tools that list modules expect."""
    code = "import raysgd.utils, raysgd.constants, raysgd.data, raysgd.version\n"
    code += "import pkgutil, raysgd\nprint(len(list(pkgutil.walk_packages(raysgd.__path__, 'raysgd.'))))"
    done = run(code, blocked=HEAVY)
    assert done.returncode == 0 and int(done.stdout) > 100, done.stderr


@pytest.mark.parametrize("blocked", [HEAVY, ("torch",)], ids=["all", "torch"])
def test_a_missing_framework_names_the_extra(blocked: tuple[str, ...]) -> None:
    names = ["TorchTrainer", "TrainingOperator", "TrainingOptions"]
    code = f"import raysgd\nfor name in {names}:\n    try: getattr(raysgd, name)\n    except ImportError as e: print(e)"
    done = run(code, blocked)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stdout + done.stderr
    assert all("raysgd[torch]" in line and name in line for name, line in zip(names, lines, strict=True)), lines

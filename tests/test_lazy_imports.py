"""`import raysgd` needs no framework and no Ray; what does need one says which extra to install."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_light_modules_import_with_everything_blocked() -> None:
    done = run("import raysgd, raysgd.utils, raysgd.constants, raysgd.data, raysgd.version", blocked=HEAVY)
    assert done.returncode == 0, done.stderr


def test_importing_raysgd_loads_nothing_heavy() -> None:
    done = run(f"import raysgd, raysgd.data, raysgd.utils; print(sorted(set({HEAVY}) & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_star_import_loads_no_tensorflow() -> None:
    """It gives the names for PyTorch. TFTrainer is imported by its name."""
    packages = ("raysgd", "raysgd.torch", "raysgd.train", "raysgd.callbacks")
    code = "".join(f"from {package} import *\n" for package in packages)
    code += "import sys, raysgd\nprint(TorchTrainer, [each for each in ('tensorflow', 'keras') if each in sys.modules])"
    done = run(code + "\nprint('TFTrainer' in dir(raysgd))")
    first, second = done.stdout.splitlines()
    assert first.endswith(" []") and second == "True", done.stdout + done.stderr


def test_all_modules_can_be_listed_without_optional_packages() -> None:
    """A module that needs a package that is not installed raises ImportError, which tools that list modules expect."""
    code = "import pkgutil, raysgd\nprint(len(list(pkgutil.walk_packages(raysgd.__path__, 'raysgd.'))))"
    done = run(code, blocked=HEAVY)
    assert done.returncode == 0 and int(done.stdout) > 100, done.stderr


def test_importing_raysgd_loads_no_old_names() -> None:
    """Nor do the trainers, which load nearly everything else. Old modules are created from a table in `raysgd.compat`."""
    code = """
import sys, raysgd, raysgd.train
raysgd.TorchTrainer, raysgd.train.Trainer
print([name for name in sys.modules if name.startswith("raysgd.compat")])
"""
    done = run(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("blocked", [HEAVY, ("torch",)], ids=["all", "torch"])
@pytest.mark.parametrize("name", ["TorchTrainer", "TrainingOperator", "TrainingOptions"])
def test_a_missing_framework_names_the_extra(name: str, blocked: tuple[str, ...]) -> None:
    code = f"import raysgd\ntry:\n    raysgd.{name}\nexcept ImportError as e:\n    print(e)"
    done = run(code, blocked)
    assert done.returncode == 0, done.stderr
    assert "raysgd[torch]" in done.stdout
    assert name in done.stdout


def test_an_unknown_name_is_an_attribute_error() -> None:
    done = run("import raysgd\ntry:\n    raysgd.TorchTrainr\nexcept AttributeError as e:\n    print(e)")
    assert "TorchTrainr" in done.stdout, done.stderr

"""Run tests with other versions of Python, torch, Ray and Trainers: `python tools/try_versions.py oldest newest`.

Each combination gets a virtual environment in the user's cache folder. The oldest versions are those that setup.py
asks for. The newest are whatever the package index has.
Their builds of torch bring CUDA: several GB to download for each combination, once.

A combination's interpreter is looked for in PATH and among pyenv's. A missing one is an error, and PYTHON_3_10 (or
3_13) can name it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Combination(NamedTuple):
    """A Python, and what pip installs for it."""

    python: str
    packages: tuple[str, ...]


COMBINATIONS = {
    "oldest": Combination(
        "3.10", ("torch==2.10.0", "ray==2.40.0", "lightning==2.5.0", "transformers==4.57.1", "accelerate==1.3.0")
    ),
    "newest": Combination("3.13", ("torch", "ray", "lightning", "transformers", "accelerate")),
}
# What the tests below import, beside raysgd's own requirements.
FOR_TESTS = (
    "greenlet",
    "hypothesis",
    "numpy",
    "psutil",
    "pytest>=8",
    "pytest-timeout",
    "scikit-learn",
    "setuptools<81",
    "tqdm",
)
# Private names of torch and Ray, state dictionaries and files, process groups, worker processes, failures and growth in
# both APIs, sharded models, and the example that the README begins with.
TESTS = (
    *("tests/package/test_foreign.py", "tests/torch", "tests/train/test_trainer.py", "tests/train/lightning"),
    "tests/train/huggingface",
    *(
        "tests/contracts/test_worker_group.py",
        "tests/elastic/test_function_faults.py",
        "tests/elastic/test_membership.py",
        "tests/elastic/test_worker_failures.py",
    ),
    "tests/examples/test_examples.py::test_example[demo.py]",
)


def interpreter(version: str) -> str:
    """Return the path of this Python. Raise an OSError if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        os.environ.get(f"PYTHON_{version.replace('.', '_')}"),
        shutil.which(f"python{version}"),
        *sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python{version}")),
    ]
    for candidate in filter(None, candidates):
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return candidate
    raise OSError(f"Python {version} was not found; install it, or set PYTHON_{version.replace('.', '_')} to its path")


def environment(name: str, cache: Path) -> Path:
    """Make the combination's environment, or bring it up to date. Return its interpreter."""
    combination = COMBINATIONS[name]
    folder = cache / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter(combination.python), "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", *combination.packages, *FOR_TESTS], check=True)
    # The requirements of setup.py, which must accept these versions.
    subprocess.run([*pip, "--editable", f"{ROOT}[torch]"], check=True)
    return python


def run(name: str, cache: Path, arguments: list[str]) -> int:
    """Run the tests in the combination's environment. Return pytest's exit status."""
    print(
        f"{name}: installing {', '.join(COMBINATIONS[name].packages)} for Python {COMBINATIONS[name].python}",
        flush=True,
    )
    python = environment(name, cache)
    versions = (
        "import sys, torch, ray; print(sys.version.split()[0], 'torch', torch.__version__, 'ray', ray.__version__)"
    )
    subprocess.run([str(python), "-c", versions], check=True)
    with tempfile.TemporaryDirectory() as folder:
        pytest = [str(python), "-m", "pytest", "-q", "-o", f"cache_dir={folder}", *(arguments or TESTS)]
        return subprocess.run(pytest, cwd=ROOT, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "combinations", nargs="*", metavar="COMBINATION", help=f"any of {', '.join(COMBINATIONS)} (default: all)"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "raysgd" / "versions")
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests instead of the usual ones")
    args = parser.parse_args()
    unknown = sorted(set(args.combinations) - COMBINATIONS.keys())
    if unknown:
        parser.error(f"unknown combination(s): {', '.join(unknown)}; known are {', '.join(COMBINATIONS)}")
    failed = [name for name in args.combinations or COMBINATIONS if run(name, args.cache, args.tests) != 0]
    if failed:
        sys.exit(f"tests failed with {', '.join(failed)}")


if __name__ == "__main__":
    main()

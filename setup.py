"""The package: its name, what it needs, and where `raysgd.operators` lies."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def constant(name: str) -> str:
    """Read, not imported: building must not need what the library needs."""
    text = (ROOT / "raysgd" / "version.py").read_text(encoding="utf-8")
    match = re.search(rf'^{name} = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError(f'raysgd/version.py must hold one line of the form {name} = "..."')
    return match.group(1)


DOCUMENTATION = constant("__documentation__")


def readme() -> str:
    """Return the README with links and pictures that work outside of the repository; files that only it has are not linked."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\(docs/(\w+)\.md", rf"({DOCUMENTATION}\1.html", text)
    text = re.sub(r'"docs/\w+/(\w+\.svg)"', rf'"{DOCUMENTATION}_images/\1"', text)
    return re.sub(r"\[([^][]+)\]\((?!https?:)[^)]*\)", r"\1", text)


# raysgd/operators is a link for bare checkouts. The build takes the folder itself, so that a wheel holds each
# file once, also where links do not exist.
PACKAGES = [
    *find_packages(include=["raysgd", "raysgd.*"], exclude=["raysgd.operators", "raysgd.operators.*"]),
    "raysgd.operators",
    *(f"raysgd.operators.{name}" for name in find_packages("operators")),
]

TORCH = ["torch>=2.10", "tqdm"]
TENSORFLOW = ["tensorflow>=2.16", "tqdm"]
# Not Horovod itself: it has no wheels, and its sources must be patched first. `tools/build_horovod.py` does that;
# here is what it and Horovod need.
HOROVOD = [*TORCH, "cffi", "cloudpickle", "cmake", "packaging", "psutil", "pyyaml", "setuptools>=64", "wheel"]
LIGHTNING = [*TORCH, "lightning>=2.5"]
TORCHMETRICS = [*TORCH, "torchmetrics>=1.0"]
TRANSFORMERS = [*TORCHMETRICS, "transformers", "peft"]
HUGGINGFACE = [*TORCH, "transformers>=4.57", "accelerate>=1.3"]
OPERATORS = [*TRANSFORMERS, "scikit-learn", "timm", "torchvision"]
TUNE = ["ray[tune]"]
DATA = ["ray[data]>=2.40"]
STORAGE = ["fsspec"]
S3 = [*STORAGE, "s3fs"]
CHECKSUMS = ["zlib-ng"]
TENSORBOARD = ["tensorboard"]
# MLflow's local store is a database, for which mlflow-skinny brings neither sqlalchemy nor alembic.
MLFLOW = ["mlflow-skinny", "sqlalchemy", "alembic"]
WANDB = ["wandb"]
HISTORY = ["matplotlib", "pandas"]
CALLBACKS = ["tqdm", *TENSORBOARD, *MLFLOW, *WANDB, *HISTORY]
BENCH = [*LIGHTNING, "accelerate", "ray[train]", "matplotlib"]
DOCS = ["sphinx>=7", "myst-nb", "myst-parser>=2", "sphinx-copybutton", "sphinx-design", "furo"]
DEV = [
    *LIGHTNING,
    *HUGGINGFACE,
    *TRANSFORMERS,  # not timm: it needs torchvision, whose wheels cannot be imported beside the CPU build of torch
    *TUNE,
    *DATA,
    *S3,
    *CHECKSUMS,
    *CALLBACKS,
    *DOCS,
    "greenlet",
    "hypothesis",
    "ipykernel",
    "moto[server]",
    "mypy",
    "nbclient",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "scikit-learn",
    "setuptools>=64",
    "tensorflow-cpu",
    "torchdata",
    "types-tqdm",
    "wheel",
]

setup(
    name="raysgd",
    version=constant("__version__"),
    description="Elastic distributed training on Ray: a model is a class, trained on any number of workers",
    long_description=readme(),
    long_description_content_type="text/markdown",
    url=DOCUMENTATION,
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=PACKAGES,
    package_dir={"raysgd.operators": "operators"},
    package_data={"raysgd": ["py.typed"]},
    install_requires=["ray>=2.40", "numpy", "click", "packaging"],  # Ray needs the latter two, too
    entry_points={"console_scripts": ["raysgd = raysgd.cli:main"]},
    extras_require={
        "torch": TORCH,
        "tensorflow": TENSORFLOW,
        "horovod": HOROVOD,
        "lightning": LIGHTNING,
        "huggingface": HUGGINGFACE,
        "torchmetrics": TORCHMETRICS,
        "operators": OPERATORS,
        "tune": TUNE,
        "data": DATA,
        "storage": STORAGE,
        "s3": S3,
        "checksums": CHECKSUMS,
        "callbacks": CALLBACKS,
        "tensorboard": TENSORBOARD,
        "mlflow": MLFLOW,
        "wandb": WANDB,
        "history": HISTORY,
        "bench": BENCH,
        "docs": DOCS,
        "dev": DEV,
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

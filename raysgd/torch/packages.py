"""The versions of other packages that parts of raysgd need. Both."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from raysgd.errors import ConfigError

LEAST = {
    "huggingface": {"transformers": "4.57", "accelerate": "1.3"},
    "lightning": {"lightning": "2.5", "pytorch_lightning": "2.5"},
}  # of each extra, as in setup.py


def check_version(package: str, *, extra: str) -> None:
    """Raise ImportError if the `package` is missing, and ConfigError if it is too old."""
    least = LEAST[extra][package]
    try:
        release = version(package)
    except PackageNotFoundError as error:
        raise ImportError(
            f"{package} is not installed. raysgd[{extra}] needs {least} or newer. Install it: pip install 'raysgd[{extra}]'"
        ) from error
    if Version(release) < Version(least):
        raise ConfigError(
            f"{package} {release} is installed. raysgd[{extra}] needs {least} or newer. Upgrade it: pip install 'raysgd[{extra}]'"
        )

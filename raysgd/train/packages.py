"""The versions of other packages that parts of raysgd.train need. Worker."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from raysgd.errors import ConfigError


def check_version(package: str, least: str, *, extra: str) -> None:
    """Raise ConfigError if the installed `package` is older than `least`."""
    found = version(package)
    if Version(found) < Version(least):
        raise ConfigError(
            f"{package} {found} is installed. raysgd[{extra}] needs {least} or newer. Upgrade it: pip install 'raysgd[{extra}]'"
        )

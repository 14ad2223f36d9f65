"""A package that is too old for a part of raysgd.train is refused."""

import pytest

from raysgd import ConfigError
from raysgd.train import packages


@pytest.mark.parametrize("found", ["4.9.1", "4.56.2", "4.57.0rc1"])
def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(packages, "version", lambda package: found)
    message = rf"transformers {found} is installed. raysgd\[huggingface\] needs 4.57 or newer. Upgrade it: pip install "
    with pytest.raises(ConfigError, match=message):
        packages.check_version("transformers", "4.57", extra="huggingface")


@pytest.mark.parametrize("found", ["4.57", "4.57.6", "4.100", "5.23.0+local"])
def test_newer_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(packages, "version", lambda package: found)
    packages.check_version("transformers", "4.57", extra="huggingface")

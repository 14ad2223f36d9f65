"""A package that is missing, or too old for a part of raysgd, is refused. The oldest versions are those that `make versions` tries."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from raysgd import ConfigError
from raysgd.torch import packages
from raysgd.torch.lightning.module import lightning_base
from tools.try_versions import COMBINATIONS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("found", ["4.9.1", "4.56.2", "4.57.0rc1"])
def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(packages, "version", lambda package: found)
    message = rf"transformers {found} is installed. raysgd\[huggingface\] needs 4.57 or newer. Upgrade it: pip install "
    with pytest.raises(ConfigError, match=message):
        packages.check_version("transformers", extra="huggingface")


@pytest.mark.parametrize("found", ["4.57", "4.57.6", "4.100", "5.23.0+local"])
def test_newer_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(packages, "version", lambda package: found)
    packages.check_version("transformers", extra="huggingface")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packages, "version", version)
    message = r"accelerate is not installed. raysgd\[huggingface\] needs 1.3 or newer. Install it: pip install "
    with pytest.raises(ImportError, match=message):
        packages.check_version("accelerate", extra="huggingface")


def test_modules_of_an_old_lightning_are_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda package: "2.4.0")
    module = type("LightningModule", (), {"__module__": "lightning.pytorch.core.module"})
    with pytest.raises(ConfigError, match=r"lightning 2.4.0 is installed. raysgd\[lightning\] needs 2.5 or newer"):
        lightning_base(module)


def test_the_oldest_versions_are_tried() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    tried = dict(each.split("==") for each in COMBINATIONS["oldest"].packages)
    for package in ("transformers", "accelerate", "lightning"):
        (least,) = {found[package] for found in packages.LEAST.values() if package in found}
        assert re.findall(rf'"{package}>=([\d.]+)"', text) == [least]
        assert tried[package].startswith(f"{least}.")

"""These tests need the extra huggingface."""

import importlib.util

import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what transformers 4.57 and accelerate 1.3 set, with these values."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")

"""Limits among the constants of RaySGD follow the environment."""

from __future__ import annotations

import pytest

import raysgd.torch.constants

SECONDS = {"NCCL_TIMEOUT_S": 1800, "SGD_PLACEMENT_GROUP_TIMEOUT_S": 100}


@pytest.mark.parametrize(("name", "default"), SECONDS.items())
def test_limits_follow_the_environment(monkeypatch, name, default):
    monkeypatch.delenv(name, raising=False)
    assert getattr(raysgd.torch.constants, name) == default
    monkeypatch.setenv(name, "7")
    assert getattr(raysgd.torch.constants, name) == 7
    monkeypatch.setenv(name, "")
    assert getattr(raysgd.torch.constants, name) == default


@pytest.mark.parametrize("text", ["soon", "-1", "0", "1.5", "inf"])
def test_an_error_about_a_limit_names_the_variable(monkeypatch, text):
    monkeypatch.setenv("NCCL_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="NCCL_TIMEOUT_S is '" + text):
        _ = raysgd.torch.constants.NCCL_TIMEOUT_S

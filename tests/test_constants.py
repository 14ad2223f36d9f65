"""Constants have the values that older code and stored results rely on."""

from __future__ import annotations

import pytest

import raysgd.constants
import raysgd.torch.constants

VALUES = {
    "NUM_SAMPLES": "num_samples",
    "BATCH_COUNT": "batch_count",
    "BATCH_SIZE": "*batch_size",
    "USE_FP16": "__use_fp16__",
    "NUM_STEPS": "__num_steps__",
    "SCHEDULER_STEP": "scheduler_step",
    "SCHEDULER_STEP_BATCH": "batch",
    "SCHEDULER_STEP_EPOCH": "epoch",
    "SCHEDULER_STEP_MANUAL": "manual",
    "VALID_SCHEDULER_STEP": {"batch", "epoch", "manual"},
}
SECONDS = {"NCCL_TIMEOUT_S": 1800, "SGD_PLACEMENT_GROUP_TIMEOUT_S": 100}


@pytest.mark.parametrize("module", [raysgd.constants, raysgd.torch.constants])
@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_values(module, name, value):
    assert getattr(module, name) == value


def test_nothing_else_is_exported():
    assert set(raysgd.constants.__all__) == set(VALUES)
    assert set(raysgd.torch.constants.__all__) == set(VALUES) | set(SECONDS)


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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NO_SUCH"):
        _ = raysgd.torch.constants.NO_SUCH

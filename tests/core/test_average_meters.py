"""Averages are weighted and exact, and do not wait for a device."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.core.measures.average_meters import AverageMeter, AverageMeterCollection


class DeviceTensor:
    """Behaves like a one-element tensor on an accelerator, and counts how often it is read."""

    is_cpu = False
    reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False

    def detach(self) -> DeviceTensor:
        return self

    def clone(self) -> DeviceTensor:
        return DeviceTensor(self.value)

    def item(self) -> float:
        DeviceTensor.reads += 1
        return self.value


def collected(*batches, name="m"):
    meters = AverageMeterCollection()
    for value, n in batches:
        meters.update({name: value}, n=n)
    return meters


NUMBERS = {
    "float": 0.5,
    "int": 3,
    "bool": True,
    "numpy float32": np.float32(0.25),
    "numpy int64": np.int64(4),
    "numpy array of one": np.array([1.5]),
    "fraction": Fraction(1, 4),
    "tensor": torch.tensor(0.75),
    "tensor with gradient": torch.tensor(0.75, requires_grad=True) * 2,
    "bfloat16 tensor": torch.tensor(0.5, dtype=torch.bfloat16),
    "device tensor": DeviceTensor(2.5),
}


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS.keys())
def test_every_kind_of_number_is_averaged(value):
    plain = float(value.item() if hasattr(value, "item") else value)
    summary = collected((value, 1), (10.0, 3)).summary()
    assert summary == {"batch_count": 2, "num_samples": 4, "m": (plain + 30) / 4, "last_m": 10.0}
    summary = collected((10.0, 3), (value, 1)).summary()
    assert summary["m"] == (plain + 30) / 4
    assert summary["last_m"] == plain
    assert type(summary["last_m"]) in (float, int, bool)


OTHERS = {
    "text": "3",
    "bytes": b"3",
    "none": None,
    "dict": {"a": 1},
    "list": [1.0],
    "complex tensor": torch.tensor(1j),
    "array": np.array([1.0, 2.0]),
    "tensor of several": torch.ones(2),
    "three numbers": (1.0, 2, 3),
    "one number": (0.5,),
    "pair of texts": ("a", "b"),
}


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS.keys())
def test_a_value_that_is_not_a_number_is_refused_by_name(value: Any) -> None:
    for earlier in ([], [(1.0, 2)]):
        with pytest.raises(TypeError, match=r"the metric 'm' is not a number, got .*: return numbers"):
            collected(*earlier, (value, 2))


def test_each_metric_is_weighted_by_its_own_batches():
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0}, n=10)
    meters.update({"loss": 4.0, "extra": 7.0}, n=20)
    summary = meters.summary()
    assert list(summary) == ["batch_count", "num_samples", "loss", "last_loss", "extra", "last_extra"]
    assert list(summary.values()) == [2, 30, 3.0, 4.0, 7.0, 7.0]


def test_nan_is_kept():
    summary = collected((1.0, 1), (math.nan, 1), (1.0, 1)).summary()
    assert math.isnan(summary["m"])
    assert summary["last_m"] == 1.0


@pytest.mark.parametrize("empty", [math.nan, torch.tensor(math.nan), DeviceTensor(math.nan)])
def test_a_batch_without_samples_does_not_change_the_mean(empty):
    summary = collected((2.0, 4), (empty, 0)).summary()
    assert (summary["batch_count"], summary["num_samples"], summary["m"]) == (2, 4, 2.0)
    assert math.isnan(collected((1.0, 0)).summary()["m"])


@pytest.mark.parametrize("n", [torch.tensor(4), np.int64(4), 4.0, 4])
def test_the_weight_may_be_any_number(n):
    summary = collected((1.0, n), (3.0, 4)).summary()
    assert (summary["num_samples"], summary["m"]) == (8, 2.0)
    assert type(summary["num_samples"]) in (int, float)


@pytest.mark.parametrize("n", [-1, math.nan, math.inf, "4", None])
def test_an_invalid_weight_is_refused_and_changes_nothing(n):
    meters = collected((1.0, 2))
    with pytest.raises(ValueError, match="number of samples"):
        meters.update({"m": 5.0}, n=n)
    assert meters.summary() == {"batch_count": 1, "num_samples": 2, "m": 1.0, "last_m": 1.0}


def test_metrics_must_be_a_dict():
    meters = AverageMeterCollection()
    with pytest.raises(TypeError, match=r"not NoneType.*train_batch"):
        meters.update(None)
    assert meters.summary() == {"batch_count": 0, "num_samples": 0}


def test_counts_and_a_users_last_metric_take_precedence():
    meters = AverageMeterCollection()
    meters.update({"num_samples": 99, "batch_count": 98, "loss": 1.0, "last_loss": 5.0}, n=2)
    assert meters.summary() == {
        "batch_count": 1,
        "num_samples": 2,
        "loss": 1.0,
        "last_loss": 5.0,
        "last_last_loss": 5.0,
    }


def test_an_update_does_not_wait_for_the_device():
    DeviceTensor.reads = 0
    meters = AverageMeterCollection()
    for step in range(100):
        meters.update({"loss": DeviceTensor(float(step))}, n=2)
    assert DeviceTensor.reads == 0
    assert meters.summary()["loss"] == 49.5
    assert meters.summary()["last_loss"] == 99.0
    assert DeviceTensor.reads == 100  # each once
    for step in range(2000):
        meters.update({"loss": DeviceTensor(float(step))}, n=2)
    assert len(meters._meters["loss"]._waiting) < 512
    assert meters.summary()["loss"] == (4950 + 1999000) / 2100


def test_all_that_waits_is_read_together():
    """When a result is asked for, and when the numbers of one metric are many."""
    together = []

    class Meters(AverageMeterCollection):
        def _read(self, waiting):
            together.append(len(waiting))
            return super()._read(waiting)

    meters, plain = Meters(), AverageMeterCollection()
    for step in range(600):
        loss = step / 7
        meters.update({"loss": DeviceTensor(loss), "rate": 0.5, "tokens": (DeviceTensor(0.1), DeviceTensor(3))}, n=2)
        plain.update({"loss": loss, "rate": 0.5, "tokens": (0.1, 3)}, n=2)
    assert together == [3 * 511 + 1]
    assert meters.summary() == plain.summary()
    assert sum(together) == 3 * 600 and len(together) == 2


def test_a_tensor_that_changes_later_counts_with_its_old_value():
    running, device = torch.tensor(1.0), DeviceTensor(1.0)
    meters = AverageMeterCollection()
    meters.update({"a": running, "b": device})
    running += 5
    device.value = 6.0
    assert (meters.summary()["a"], meters.summary()["b"]) == (1.0, 1.0)


def test_a_single_meter():
    meter = AverageMeter()
    assert (meter.sum, meter.count) == (0, 0)
    assert math.isnan(meter.avg) and math.isnan(meter.val)
    meter.update(1.0)
    meter.update(torch.tensor(4.0), n=2)
    assert (meter.val, meter.avg, meter.sum, meter.count) == (4.0, 3.0, 9.0, 3)
    with pytest.raises(TypeError, match="the value is not a number, got 'high'"):
        meter.update("high")
    meter.reset()
    assert (meter.sum, meter.count) == (0, 0)


def test_a_pair_is_a_value_with_its_weight():
    """Also on a device, where neither is read before a result is wanted."""
    DeviceTensor.reads = 0
    summary = collected(((1.0, 1), 5), ((4.0, 3), 5), ((math.nan, 0), 5)).summary()
    assert summary["m"] == 3.25 and summary["num_samples"] == 15 and summary["last_m"] == 4.0
    meters = collected((((DeviceTensor(1.0)), DeviceTensor(1)), 5), ((4.0, DeviceTensor(3)), 5), ((9.0, 9), 0))
    assert DeviceTensor.reads == 0
    assert meters.summary()["m"] == 3.25 and meters.summary()["last_m"] == 4.0
    with pytest.raises(
        ValueError,
        match=r"the weight of the metric 'm' .* must be a finite number of 0 or more, got -1",
    ):
        collected(((1.0, -1), 5))


def test_a_copy_keeps_its_numbers_and_reads_them_for_itself():
    DeviceTensor.reads = 0
    meters = collected((DeviceTensor(1.0), 1), (DeviceTensor(3.0), 1))
    copied = meters.copy()
    meters.update({"m": DeviceTensor(8.0)})
    assert DeviceTensor.reads == 0
    assert (copied.summary()["m"], copied.summary()["num_samples"]) == (2.0, 2)
    assert (meters.summary()["m"], meters.summary()["num_samples"]) == (4.0, 3)

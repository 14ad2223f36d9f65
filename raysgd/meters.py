"""Averages of what training steps report, weighted by samples. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES

# One wait for the device per so many updates bounds what is kept there.
_MAX_WAITING = 512


class AverageMeter:
    """The weighted mean of one number over many updates, and the latest number.

    A number on an accelerator is copied there, and read only when a result is asked for (or when 512 of
    them wait), so that `update` does not stall the device's queue.
    """

    __slots__ = ("_last", "_sum", "_waiting", "count")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count: float = 0
        self._sum: float = 0.0
        self._last: Any = math.nan
        self._waiting: list[tuple[Any, float]] = []

    def update(self, val: Any, n: float = 1) -> None:
        """Count `val`, a number or a one-element tensor, with weight `n`."""
        number = _number(val)
        if number is None:
            raise TypeError(
                f"a meter averages numbers and one-element tensors, not {type(val).__name__} ({val!r}). "
                "Use AverageMeterCollection to keep other values beside numbers."
            )
        self._add(number, _weight(n))

    @property
    def val(self) -> float:
        """The latest number; NaN before the first."""
        self._settle()
        return self._last  # type: ignore[no-any-return]

    @property
    def sum(self) -> float:
        """The sum of all numbers, each times its weight."""
        self._settle()
        return self._sum

    @property
    def avg(self) -> float:
        """The weighted mean; NaN while there is no weight."""
        return self.sum / self.count if self.count else math.nan

    def _add(self, number: Any, n: float) -> None:
        self.count += n
        self._last = number
        if not n:
            return  # the mean over an empty batch is NaN: with no weight it must not spoil the sum
        if isinstance(number, (float, int)):
            self._sum += number * n
            return
        self._waiting.append((number, n))
        if len(self._waiting) >= _MAX_WAITING:
            self._settle()

    def _settle(self) -> None:
        if not isinstance(self._last, (float, int)):
            self._last = self._last.item()
        for tensor, n in self._waiting:
            self._sum += tensor.item() * n
        self._waiting.clear()


class AverageMeterCollection:
    """Meters by metric name, with the count of batches and samples.

    Owns the sums of one worker; never talks to other workers. What is not a number (text, a dictionary, None,
    an array) is not averaged: the latest one is reported. In a metric that is sometimes a number, only the
    numbers count. `batch_count` and `num_samples` are its own: a metric of that name is not reported.
    """

    def __init__(self) -> None:
        self.batch_count = 0
        self.num_samples: float = 0
        self._meters: dict[str, AverageMeter] = {}
        self._others: dict[str, Any] = {}

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """Count one batch of `n` samples that measured `metrics`. Runs once per step, so it is kept cheap."""
        if type(n) is not int or n < 1:
            n = _weight(n)
        try:
            items = metrics.items()
        except AttributeError:
            raise TypeError(
                f"metrics must be a dict from name to value, not {type(metrics).__name__} ({metrics!r}). "
                "Return a dict from train_batch and validate_batch; it may be empty."
            ) from None
        self.batch_count += 1
        self.num_samples += n
        meters = self._meters
        for name, value in items:
            if type(value) is float and n and name in meters:  # the usual case, without a further call
                meter = meters[name]
                meter.count += n
                meter._sum += value * n
                meter._last = value
            else:
                self._update_one(name, value, n)

    def summary(self) -> dict[str, Any]:
        """`batch_count`, `num_samples`, and for each metric `m` its mean and, as `last_m`, the latest."""
        result: dict[str, Any] = {BATCH_COUNT: self.batch_count, NUM_SAMPLES: self.num_samples}
        reserved = set(result)
        for name, meter in self._meters.items():
            if name not in reserved:
                result[name] = meter.avg
                # A metric that is itself called last_something is the user's word and goes first.
                if f"last_{name}" not in self._meters:
                    result[f"last_{name}"] = meter.val
        for name, value in self._others.items():
            if name not in reserved:
                result.setdefault(name, value.cpu() if hasattr(value, "detach") else value)
        return result

    def state(self) -> dict[str, Any]:
        """What can be added up over workers, as plain numbers.

        `{"batch_count": int, "num_samples": number, "metrics": {name: {"weight", "sum", "last"}}}`, the three
        as floats. Values that are not numbers are not in it; `summary` has them.
        """
        metrics = {
            name: {"weight": float(meter.count), "sum": float(meter.sum), "last": float(meter.val)}
            for name, meter in self._meters.items()
        }
        return {BATCH_COUNT: self.batch_count, NUM_SAMPLES: self.num_samples, "metrics": metrics}

    def _update_one(self, name: str, value: Any, n: float) -> None:
        number = _number(value)
        if number is None:
            self._others[name] = value.detach() if hasattr(value, "detach") else value
            return
        if name not in self._meters:
            self._meters[name] = AverageMeter()
        self._meters[name]._add(number, n)


def _number(value: Any) -> Any:
    """A Python number; or a copy of a one-element tensor, still on its device; or None for all else."""
    if type(value) in (float, int, bool):
        return value
    if hasattr(value, "detach"):
        if value.numel() != 1 or value.is_complex():
            return None
        if not value.is_cpu:
            return value.detach().clone()  # a copy: the step may write into its tensor, or into what it views
    if hasattr(value, "item"):
        try:
            value = value.item()
        except ValueError:  # an array of several elements
            return None
    if isinstance(value, (float, int)):
        return value
    if isinstance(value, (str, bytes)):
        return None  # float("3") would work, yet text is not a measurement
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _weight(n: Any) -> float:
    """`n` as a Python number that can weigh a mean."""
    number = n.item() if hasattr(n, "item") else n
    if not isinstance(number, (float, int)) or not 0 <= number < math.inf:
        raise ValueError(f"n is the number of samples and must be a finite number of 0 or more, not {n!r}")
    return number

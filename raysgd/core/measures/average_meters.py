"""Average what training steps report, weighted by samples, or by weights of their own. Standard
library only. Both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from raysgd.core.measures.metrics import WeightedMean, check_name, is_in_range, out_of_range
from raysgd.errors import shown

# A float cannot represent every integer above this, so a larger weight is treated as a float.
_MOST_SAMPLES = 1 << 53
_TEXT = (str, bytes)
# At most this many numbers wait on the device before they are read.
_MAX_WAITING = 512


class AverageMeter:
    """The weighted mean of one number over many updates, and the latest number.

    A number on an accelerator is copied on its device, and read only when a result is asked for (or
    when 512 numbers wait), so that `update` does not stall the device's queue.
    """

    __slots__ = ("_last", "_sum", "_waiting", "count")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count: float = 0
        self._sum: float = 0.0
        self._last: Any = math.nan
        self._waiting: list[tuple[Any, Any]] = []

    def update(self, val: Any, n: float = 1) -> None:
        """Add `val`, a number or a one-element tensor, with weight `n`."""
        if self._add(_number(val), _weight(n)):
            self._settle()

    @property
    def val(self) -> float:
        """The latest number, NaN if there is none."""
        self._settle()
        return self._last  # type: ignore[no-any-return]

    @property
    def sum(self) -> float:
        """The sum of all numbers, each times its weight."""
        self._settle()
        return self._sum

    @property
    def avg(self) -> float:
        """The weighted mean, NaN if the weights add up to 0."""
        total = self.sum  # the count is complete then
        return total / self.count if self.count else math.nan

    def copy(self) -> AverageMeter:
        """Return one with the same numbers."""
        other = copy(self)
        other._waiting = [*self._waiting]
        return other

    def _add(self, number: Any, n: Any) -> bool:
        """Add a number. Return whether so many wait that they are to be read now."""
        self._last, known = number, isinstance(n, (float, int))
        if known:
            self.count += n
            if not n:
                return False  # the mean over an empty batch is NaN, which must not get into the sum
        if known and isinstance(number, (float, int)):
            self._sum += float(number) * n
            return False
        self._waiting.append((number, n))
        return len(self._waiting) >= _MAX_WAITING

    def _unread(self) -> dict[int, Any]:
        """The numbers and weights that wait on a device, by their `id`."""
        every = (self._last, *(each for pair in self._waiting for each in pair))
        return {id(each): each for each in every if not isinstance(each, (float, int))}

    def _settle(self, read: Mapping[int, Any] | None = None) -> None:
        """Add what waits. `read` has the values of the unread numbers."""
        values = {key: each.item() for key, each in self._unread().items()} if read is None else read
        self._last = values.get(id(self._last), self._last)
        for number, n in self._waiting:
            weight = values.get(id(n), n)
            self.count += weight if weight is not n else 0
            if weight:
                self._sum += values.get(id(number), number) * weight
        self._waiting.clear()


class AverageMeterCollection:
    """Meters by metric name, with the count of batches and samples. A metric counts the samples of
    its batch; a pair `(value, weight)` counts its weight.

    Owns the sums of one worker, and never communicates with other workers. Metrics named
    `batch_count` or `num_samples` are not reported, because the collection reports its own."""

    def __init__(self) -> None:
        self.batch_count = 0
        self.num_samples: float = 0
        self._meters: dict[str, AverageMeter] = {}
        self.counts: set[str] = set()  # metrics that are most likely (a count, the number of samples)

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """Add the metrics of one batch of `n` samples. It runs once per step, and must be fast."""
        if type(n) is not int or not 0 < n < _MOST_SAMPLES:
            n = _weight(n)
        try:
            items = metrics.items()
        except AttributeError:
            raise TypeError(
                f"metrics must be a dict from name to value, not {type(metrics).__name__} ({shown(metrics)}). "
                "Return a dict from train_batch and validate_batch; it may be empty."
            ) from None
        self.batch_count += 1
        self.num_samples += n
        meters = self._meters
        for name, value in items:
            number, known = value, n and name in meters
            if known and getattr(value, "is_cpu", False) and value.numel() == 1 and not hasattr(value, WEIGHT):
                number = value.item()
            if known and type(number) is float:  # the usual case, without a further call
                meter = meters[name]
                meter.count += n
                meter._sum += number * n
                meter._last = number
            else:
                self._update_one(name, value, n)

    def update_in_parts(self, parts: Sequence[tuple[Mapping[str, Any], float]]) -> None:
        """Add the metrics of one batch, whose parts measured them with these weights. Its latest
        value is their mean."""
        for metrics, n in parts:
            self.update(metrics, n=n)
        self.batch_count -= len(parts) - 1
        for name in parts[-1][0] if len(parts) > 1 else ():
            pairs = [_weighted(name, metrics[name], n) for metrics, n in parts if n and name in metrics]
            # A weight on the device is not read.
            numbers = [(number, n) for number, n in pairs if not isinstance(n, (float, int)) or n]
            if numbers:
                self._meters[name]._last = sum(number * n for number, n in numbers) / sum(n for _, n in numbers)

    def summary(self) -> dict[str, Any]:
        """The counts, and each metric's mean and, as `last_m`, its latest value."""
        self._settle()
        result: dict[str, Any] = {BATCH_COUNT: self.batch_count, NUM_SAMPLES: self.num_samples}
        reserved = set(result)
        for name, meter in self._meters.items():
            if name not in reserved:
                mean = meter.avg
                result[name] = mean if meter.count == self.num_samples else WeightedMean(mean, meter.count)
                # If the user has a metric of this name, that one is reported.
                if f"last_{name}" not in self._meters:
                    result[f"last_{name}"] = meter.val
        return result

    def copy(self) -> AverageMeterCollection:
        """Return one with the same numbers, which another thread may read."""
        other = copy(self)
        other._meters = {name: each.copy() for name, each in self._meters.items()}
        return other

    def _update_one(self, name: str, value: Any, n: float) -> None:
        weighted = type(value) is tuple or hasattr(value, WEIGHT)
        samples = n
        if name not in self._meters:
            check_name(name)
        number, n = _weighted(name, value, n)
        is_count = weighted and type(number) is int and 1 < number <= samples == n
        if is_count and any(each in str(name).lower() for each in ("acc", "correct")):
            self.counts.add(name)
        if name not in self._meters:
            self._meters[name] = AverageMeter()
        # The mean over an empty batch, often NaN, is not the latest value.
        if (not isinstance(n, (float, int)) or n) and self._meters[name]._add(number, n):
            self._settle()

    def _settle(self) -> None:
        waiting = {key: each for meter in self._meters.values() for key, each in meter._unread().items()}
        values = dict(zip(waiting, self._read([*waiting.values()]) if waiting else (), strict=True))
        for meter in self._meters.values():
            meter._settle(values)

    def _read(self, waiting: list[Any]) -> list[float]:
        return [each.item() for each in waiting]


def copy_metric(value: Any) -> Any:
    """A metric as it is now: the next batch may write to the memory of a tensor."""
    if type(value) is tuple:
        return tuple(map(copy_metric, value))
    if not _is_tensor(value):
        return value
    copied = value.detach().clone()
    if hasattr(value, WEIGHT):
        setattr(copied, WEIGHT, getattr(value, WEIGHT))
    return copied


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "numel")


def _number(value: Any, name: Any = None, *, copied: bool = True) -> Any:
    """A Python number, or a one-element tensor on its device. The tensor is `copied` if the step
    may write to it later. Raise TypeError if the value is not a number."""
    if type(value) in (float, bool):
        return value
    if _is_tensor(value):
        if value.numel() != 1 or value.is_complex():
            raise _no_number(value, name)
        if getattr(value, "is_meta", False):
            raise ValueError(f"{_named(name)} is a tensor on the device 'meta', which holds no data: return its value")
        if not value.is_cpu:
            return value.detach().clone() if copied else value
    try:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, (float, int, *_TEXT)):  # float("3") would succeed, but a text is not a measurement
            number = float(number)
    except OverflowError:
        raise out_of_range(_named(name), value) from None
    except Exception:  # an array of several elements, None, or a user's object that raises an error
        raise _no_number(value, name) from None
    if isinstance(number, _TEXT):
        raise _no_number(value, name)
    if isinstance(number, int) and not is_in_range(number):
        raise out_of_range(_named(name), number)
    return number


def _no_number(value: Any, name: Any) -> TypeError:
    return TypeError(
        f"{_named(name)} is not a number, got {shown(value)} of type {type(value).__name__}: return numbers, each under its "
        "own name, or a pair (value, weight)"
    )


def _weighted(name: Any, value: Any, n: float) -> tuple[Any, Any]:
    """A metric's number and weight, in a batch of `n` samples."""
    if hasattr(value, WEIGHT):
        number, weight = _number(value, name), _number(getattr(value, WEIGHT), copied=False)
    elif type(value) is tuple and len(value) == 2:
        number, weight = (_number(each, name) for each in value)
    else:
        return _number(value, name), n
    if n and isinstance(weight, (float, int)):
        weight = _weight(weight, name)
    return number, weight if n else 0


def _named(name: Any) -> str:
    return "the value" if name is None else f"the metric {shown(name)}"


def _weight(n: Any, name: Any = None) -> float:
    """Convert `n` to a Python number that can be a weight, of this metric or of a batch. Raise
    ValueError if it cannot."""
    try:
        number = n.item() if hasattr(n, "item") else n
    except Exception:  # an array of several elements
        number = None
    if not isinstance(number, (float, int)) or not 0 <= number < math.inf or not is_in_range(int(number)):
        of = f"the weight of {_named(name)} (return two other numbers under two names)"
        of = "num_samples, the number of samples of a batch," if name is None else of
        raise ValueError(f"{of} must be a finite number of 0 or more, got {shown(n)}")
    return float(number) if number >= _MOST_SAMPLES else number

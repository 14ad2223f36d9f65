"""Average what training steps report, weighted by samples, or by weights of their own. Standard
library only. Both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from raysgd.core.metrics import WeightedMean, check_metric, is_in_range, out_of_range
from raysgd.errors import counted, shown

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
        number = _number(val)
        if number is None:
            raise TypeError(
                f"a meter averages numbers and one-element tensors, not {type(val).__name__} ({shown(val)}). "
                "Use AverageMeterCollection to keep other values beside numbers."
            )
        if self._add(number, _weight(n)):
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
        found = {key: each.item() for key, each in self._unread().items()} if read is None else read
        self._last = found.get(id(self._last), self._last)
        for number, n in self._waiting:
            weight = found.get(id(n), n)
            self.count += weight if weight is not n else 0
            if weight:
                self._sum += found.get(id(number), number) * weight
        self._waiting.clear()


class AverageMeterCollection:
    """Meters by metric name, with the count of batches and samples. A metric counts the samples of
    its batch; a pair `(value, weight)` counts its weight.

    Owns the sums of one worker, and never communicates with other workers. Values that are not
    numbers (text, dictionaries, None, arrays) are not averaged: the latest one is reported. If a
    metric is sometimes a number, only its numbers count. Metrics named `batch_count` or
    `num_samples` are not reported, because the collection reports its own."""

    def __init__(self) -> None:
        self.batch_count = 0
        self.num_samples: float = 0
        self._meters: dict[str, AverageMeter] = {}
        self._others: dict[str, Any] = {}
        self._changing: set[str] = set()  # texts that were not the same in all batches
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
            found = [_weighted(name, metrics.get(name), n) for metrics, n in parts if n]
            # A weight on the device is not read.
            numbers = [
                (number, n) for number, n in found if number is not None and (not isinstance(n, (float, int)) or n)
            ]
            if numbers and name in self._meters:
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
        for name, value in self._others.items():
            if name not in reserved:
                result.setdefault(name, value.cpu() if _is_tensor(value) else value)
        return result

    @property
    def texts(self) -> list[str]:
        """The metrics that were other numbers in each batch, in a text."""
        return [name for name in self._changing if _reads_as_number(self._others.get(name))]

    @property
    def mixed(self) -> list[str]:
        """The metrics that were numbers in some batches only, and not None in the others."""
        return [name for name, value in self._others.items() if name in self._meters and value is not None]

    def copy(self) -> AverageMeterCollection:
        """Return one with the same numbers, which another thread may read."""
        other = copy(self)
        other._meters = {name: each.copy() for name, each in self._meters.items()}
        other._others = dict(self._others)
        return other

    def _update_one(self, name: str, value: Any, n: float) -> None:
        weighted = type(value) is tuple or hasattr(value, WEIGHT)
        samples = n
        number, n = _weighted(name, value, n) if weighted else (_number(value, name), n)
        is_count = weighted and type(number) is int and 1 < number <= samples == n
        if is_count and any(each in str(name).lower() for each in ("acc", "correct")):
            self.counts.add(name)
        if name not in self._meters and name not in self._others:
            check_metric(name, value)  # only once, because later batches return the same kind of value
        if number is None:
            if isinstance(value, str) and self._others.get(name, value) != value:
                self._changing.add(name)
            self._others[name] = value.detach() if _is_tensor(value) else value
            return
        if name not in self._meters:
            self._meters[name] = AverageMeter()
        # The mean over an empty batch, often NaN, is not the latest value.
        if (not isinstance(n, (float, int)) or n) and self._meters[name]._add(number, n):
            self._settle()

    def _settle(self) -> None:
        waiting = {key: each for meter in self._meters.values() for key, each in meter._unread().items()}
        found = dict(zip(waiting, self._read([*waiting.values()]) if waiting else (), strict=True))
        for meter in self._meters.values():
            meter._settle(found)

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
    """A Python number, a one-element tensor on its device, or None. The tensor is `copied` if the
    step may write to it later."""
    if type(value) in (float, bool):
        return value
    if _is_tensor(value):
        if value.numel() != 1 or value.is_complex():
            return None
        if getattr(value, "is_meta", False):
            raise ValueError(f"{_named(name)} is a tensor on the device 'meta', which holds no data: return its value")
        if not value.is_cpu:
            return value.detach().clone() if copied else value
    try:
        if hasattr(value, "item"):
            value = value.item()
        # float("3") would succeed, but text is not a measurement
        number = value if isinstance(value, (float, int)) else None if isinstance(value, _TEXT) else float(value)
    except OverflowError:
        raise out_of_range(_named(name), value) from None
    except Exception:  # an array of several elements, None, or a user's object that raises an error
        return None
    if isinstance(number, int) and not is_in_range(number):
        raise out_of_range(_named(name), number)
    return number


def _reads_as_number(text: Any) -> bool:
    try:
        float(str(text).rstrip("% "))
    except ValueError:
        return False
    return True


def _weighted(name: Any, value: Any, n: float) -> tuple[Any, Any]:
    """A metric's number and weight, in a batch of `n` samples. The number is None if it is not
    one."""
    if hasattr(value, WEIGHT):
        value = (value, getattr(value, WEIGHT))
        numbers = [_number(value[0], name), _number(value[1], copied=False)]
    else:
        numbers = [_number(each, name) for each in value] if type(value) is tuple else []
    if numbers and all(each is not None for each in numbers):
        if len(numbers) != 2:
            raise ValueError(
                f"{_named(name)} is a tuple of {counted(len(numbers), 'number')}, got {shown(value)}: return a pair, "
                "(value, weight), for a mean that is weighted by that, or a list"
            )
        number, weight = numbers
        if n and isinstance(weight, (float, int)):
            weight = _weight(weight, f"the weight of {_named(name)} (return two other numbers as a list)")
        return number, weight if n else 0
    return _number(value, name), n


def _named(name: Any) -> str:
    return "the value" if name is None else f"the metric {shown(name)}"


def _weight(n: Any, of: str = "num_samples, the number of samples of a batch,") -> float:
    """Convert `n` to a Python number that can be a weight. Raise ValueError if it cannot."""
    try:
        number = n.item() if hasattr(n, "item") else n
    except Exception:  # an array of several elements
        number = None
    if not isinstance(number, (float, int)) or not 0 <= number < math.inf or not is_in_range(int(number)):
        raise ValueError(f"{of} must be a finite number of 0 or more, got {shown(n)}")
    return float(number) if number >= _MOST_SAMPLES else number

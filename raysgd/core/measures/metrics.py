"""Merge what the ranks measured into one dictionary. Pure: any split of the same work gives the
same values. Both.

The metrics of one rank in one part of a call are a dict: `num_samples`, `batch_count`, the user's,
`last_` ones. A call that was interrupted has several parts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Rational, Real
from typing import Any, Literal

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.measures.speed import Sums
from raysgd.errors import ConfigError, close_to, shown

SKIPPED = "skipped_steps"
LARGEST = sys.float_info.max
DEEPEST = 100
# Limits on the metrics in a progress message: characters of one name, of all metrics, bits of one integer.
LONGEST_NAME, LONGEST_BRIEF, LARGEST_INT_BITS = 200, 64_000, 64
# Names in results that raysgd gives itself. An operator's own loop may count the batches and what it left out.
COUNTED = frozenset({BATCH_COUNT, SKIPPED})
OWN_NAMES = COUNTED | {"epoch", "profile"}
Result = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What one worker has measured in a part of a call: metrics, and what users do not see.

    committed   how many samples all ranks together have committed in the call; 0 if not known
    drawn       how many of them this worker has committed in this part, if `committed` is known
    batch_mode  what becomes of the batch: "parts", "global" or "per_worker"
    rows        what is known of the worker's rows without reading them, by loader
    returned    an object that the operator returned in place of metrics, alone in a tuple
    loaders     in place of `metrics`, if several loaders were evaluated: those of each, by what
                their names begin with
    traces      profiler traces, as {file name: bytes}
    stop        whether the user's code wants the loop over epochs to end
    pace        what the loops of the worker have taken, in a progress message
    place       where an evaluation has ended: the pass, the offset, and whether the pass has ended
    """

    metrics: Result = field(default_factory=dict)
    committed: int = 0
    drawn: int = 0
    batch_mode: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()
    loaders: Mapping[str, Result] = field(default_factory=dict)
    traces: Mapping[str, bytes] = field(default_factory=dict)
    stop: bool = False
    pace: Sums | None = None
    place: tuple[int, int, bool] | None = None


class WeightedMean(float):
    """The mean of a metric that does not count all samples of its result: it has a `weight` of its
    own."""

    def __new__(cls, mean: float, weight: float) -> WeightedMean:
        number = super().__new__(cls, mean)
        number.weight = weight
        return number

    weight: float

    def __reduce__(self) -> Any:
        return WeightedMean, (float(self), self.weight)


def unmeasured(argument: str, metric: str, names: Collection[str]) -> ConfigError:
    """The error of an `argument` that names a metric which is none of these."""
    meant = close_to(metric, names)
    hint = f"did you mean {meant!r}?" if meant else f"choose one of {', '.join(sorted(names))}"
    return ConfigError(f"{argument} was not measured: {hint}")


def refuse_own_names(result: Mapping[Any, Any], *, of: str, names: Set[str] = OWN_NAMES) -> None:
    """Raise ValueError for a metric with the name of one of raysgd's own. `of` says whose."""
    clash = next((name for name in result if name in names), None)
    if clash is not None:
        raise ValueError(
            f"{of} returned a metric named {clash!r}, and raysgd's results have values of their own with the names "
            f"{', '.join(sorted(names))}: give the metric another name, such as 'my_{clash}'"
        )


def check_metrics(result: Mapping[Any, Any], *, of: str) -> None:
    """Raise an error for a metric that cannot be averaged, sent or stored. `of` says whose."""
    for name, value in result.items():
        try:
            check_metric(name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{of}: {error}") from None


def check_metric(name: Any, value: Any) -> None:
    """Raise TypeError for a name that is not a string, ValueError for an unusable value."""
    check_name(name)
    if isinstance(value, Rational) and not is_in_range(value):
        raise out_of_range(f"the metric {name!r}", value)
    if isinstance(value, (Mapping, list, tuple, Set)):
        _check_nested(name, value, set(), 1)


def check_name(name: Any) -> None:
    """Raise TypeError for the name of a metric that is not a string."""
    if not isinstance(name, str):
        example = f"use a string, such as {shown(str(name), 40)}" if isinstance(name, (int, float)) else "use a string"
        raise TypeError(
            f"the name of a metric must be a string, got {shown(name)} of type {type(name).__name__}: {example}"
        )


def is_in_range(number: Any) -> bool:
    """Whether a float can hold a number of this size."""
    return bool(-LARGEST <= number <= LARGEST)  # exact, because Python compares integers and floats without rounding


def out_of_range(what: str, number: Any) -> ValueError:
    """The error about a number that no float can hold."""
    size = f" of {number.bit_length()} bits" if isinstance(number, int) else ""
    return ValueError(
        f"{what} is a number{size} that no float can hold. Metrics are averaged as floats, so numbers must lie between "
        f"-{LARGEST:.2g} and {LARGEST:.2g}: return float('inf') or a logarithm"
    )


def _check_nested(name: str, value: Any, seen: set[int], depth: int) -> None:
    """Raise an error if a container contains itself: code that walks it would never end."""
    if depth > DEEPEST:
        raise ValueError(
            f"the metric {name!r} contains itself, or is nested more than {DEEPEST} levels deep: return a flatter value"
        )
    for inner in value.values() if isinstance(value, Mapping) else value:
        if type(inner) is int and not is_in_range(inner):
            raise out_of_range(f"a number in the metric {name!r}", inner)
        if isinstance(inner, (Mapping, list, tuple)) and id(inner) not in seen:
            _check_nested(name, inner, seen, depth + 1)
            seen.add(id(inner))  # only now, so that a value that contains itself reaches the limit of depth


def plain(value: Any) -> Any:
    """Convert a single number (NumPy, torch, TensorFlow) to Python's own. Leave other values."""
    if isinstance(value, WeightedMean):
        return float(value)
    if isinstance(value, (bool, int, float)) or value is None or isinstance(value, (str, bytes, Mapping)):
        return value
    try:
        shape = getattr(value, "shape", None)
        if shape is None or math.prod(shape) != 1:
            return value
        number = value.numpy() if hasattr(value, "numpy") and not hasattr(value, "item") else value
        return number.item() if hasattr(number, "item") else value
    except Exception:  # a user's object may raise anything here, and is not a number then
        return value


def briefly(measured: Measured | None) -> Measured | None:
    return None if measured is None else replace(measured, metrics=brief(measured.metrics))


def brief(result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a result that progress messages contain: its counts and other numbers, 64,000
    characters at most. The rest reaches the driver with the call's result."""
    part: dict[str, Any] = {}
    size = 0
    for name in dict.fromkeys(("epoch", BATCH_COUNT, NUM_SAMPLES, SKIPPED, *result)):
        value = _number_or_none(result.get(name))
        if value is not None and isinstance(name, str) and len(name) <= LONGEST_NAME:
            size += len(name) + len(repr(value))
            if size > LONGEST_BRIEF:
                break
            part[name] = value
    return {str.__str__(name): part[name] for name in result if name in part}


def _number_or_none(value: Any) -> Any:
    """A number as Python's own, which needs no import, or None."""
    if type(value).__module__ == "numpy" and isinstance(value, Real):
        value = value.item()  # type: ignore[attr-defined]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= LARGEST_INT_BITS else None
    return float(value) if isinstance(value, float) else None


def numbers(result: Mapping[str, Any]) -> Result:
    """The numbers in a result."""
    values = {name: _kept(value) for name, value in result.items()}
    return {name: value for name, value in values.items() if _is_number(value)}


def _kept(value: Any) -> Any:
    return value if isinstance(value, WeightedMean) else plain(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


def _weighted(result: Mapping[str, Any], key: str) -> tuple[Any, float]:
    """A metric with its weight: by default, the samples of its result."""
    value = result[key]
    return value, value.weight if isinstance(value, WeightedMean) else _samples(result)


def _samples(result: Mapping[str, Any]) -> float:
    samples: Any = result.get(NUM_SAMPLES)
    return float(samples) if _is_number(samples) and samples == samples else 1.0


def _mean(pairs: Sequence[tuple[Any, float]], samples: float) -> Any:
    """Compute the weighted mean, of these samples or of other weights. A NaN makes it a NaN, so
    that users see it."""
    total = sum(weight for _, weight in pairs)
    if len(pairs) == 1:
        mean = float(pairs[0][0])  # exact, however large it is
    elif total == 0:
        mean = sum(float(value) for value, _ in pairs) / len(pairs)
    else:
        mean = sum(float(value) * weight for value, weight in pairs if weight) / total
    return mean if total == samples else WeightedMean(mean, total)


def merge_results(results: Sequence[Mapping[str, Any]], *, of: Literal["ranks", "parts"]) -> Result:
    """Merge the results `of` the ranks in one part of a call, or of the parts of a call, in order.

    `num_samples` is summed. Other numbers are means weighted by samples, or by weights of their
    own, over the results that have them. Counts of batches and `epoch` are the largest of the
    ranks. Over the parts, counts are summed, and `epoch` and what begins with `last_` is the last
    one's. Anything else is the first rank's, or the last part's. `epoch` comes first."""
    rows = [{key: _kept(value) for key, value in result.items()} for result in results if result]
    if of == "parts":
        rows = [row for row in rows if row.get(BATCH_COUNT) or row.get(NUM_SAMPLES)] or rows
    merged: Result = {}
    samples = sum(_samples(row) for row in rows)
    for key in dict.fromkeys(key for row in rows for key in row):
        pairs = [_weighted(row, key) for row in rows if key in row]
        numbers = [value for value, _ in pairs if _is_number(value)]
        if len(numbers) < len(pairs) or (of == "parts" and (key.startswith("last_") or key == "epoch")):
            merged[key] = pairs[0 if of == "ranks" else -1][0]
        elif key == NUM_SAMPLES or (of == "parts" and key in COUNTED):
            merged[key] = sum(numbers)
        elif key in COUNTED or key == "epoch":
            merged[key] = max(numbers)
        else:
            merged[key] = _mean(pairs, samples)
    return _ordered(merged)


def merge_measured(parts: Sequence[Sequence[Measured]]) -> Measured:
    """Merge what the ranks measured in the parts of a call."""
    every = [each for part in parts for each in part]
    committed, drawn = max((each.committed for each in every), default=0), sum(each.drawn for each in every)
    return Measured(merge_results([_of_part(part) for part in parts], of="parts"), committed, drawn)


def _of_part(part: Sequence[Measured]) -> Result:
    """Merge what the ranks measured in a part of a call. Each of several loaders has a mean over
    its own samples; the counts are those of all."""
    merged = merge_results([each.metrics for each in part], of="ranks")
    names = list(part[0].loaders) if part else []
    for rank, each in enumerate(part):
        if list(each.loaders) != names:  # they have evaluated other data at the same time
            raise ConfigError(
                f"the loaders of ranks 0 and {rank} have different names, or a different order: their results begin with {names} and "
                f"{list(each.loaders)}. Register loaders with the same names in the same order on every worker"
            )
    for name in names:
        for key, value in merge_results([each.loaders[name] for each in part], of="ranks").items():
            if key in (NUM_SAMPLES, BATCH_COUNT):
                merged[key] = merged.get(key, 0) + value
            else:
                merged[f"last_{name}{key[5:]}" if key.startswith("last_") else f"{name}{key}"] = value
    return merged


def merge_call(parts: Sequence[Sequence[Measured]]) -> Result:
    """Return the result of a call, of what the ranks measured in its parts.

    The samples that the sampling plan knows were trained on count, also those whose metrics failed
    with a worker. A sum in other units (tokens, say) that lacks these is left out.
    """
    merged = merge_measured(parts)
    result, committed = merged.metrics, merged.committed
    if len(parts) > 1 and committed and _is_number(result.get(NUM_SAMPLES)):
        counted = [
            (each.metrics[NUM_SAMPLES], each.drawn) for part in parts for each in part if each.metrics.get(NUM_SAMPLES)
        ]
        if all(samples <= drawn for samples, drawn in counted):
            result[NUM_SAMPLES] = committed
        elif sum(drawn for _, drawn in counted) != committed:
            del result[NUM_SAMPLES]
    return {name: float(value) if isinstance(value, WeightedMean) else value for name, value in result.items()}


def cost(value: float | None, mode: str) -> float:
    """A number that is lower for better values of a metric, which are "min" or "max". NaN is as bad
    as no value."""
    if value is None or math.isnan(value):
        return math.inf
    return float(value) if mode == "min" else -float(value)


def for_all_ranks(result: Mapping[str, Any], ranks: int, mine: float, committed: int) -> Result:
    """One rank's result of a part with the number of samples of all `ranks`, which have `committed`
    that many in it, and this one its `mine` (0 if that is not known). A number in other units
    (tokens, say) cannot be determined exactly."""
    samples: Any = result.get(NUM_SAMPLES)
    if not _is_number(samples):
        return dict(result)
    return {**result, NUM_SAMPLES: committed if committed and samples == mine else samples * ranks}


def _ordered(result: Result) -> Result:
    head = [key for key in ("epoch", BATCH_COUNT, NUM_SAMPLES) if key in result]
    return {key: result[key] for key in [*head, *(key for key in result if key not in head)]}

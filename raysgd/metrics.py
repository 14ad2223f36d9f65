"""From what every rank measured to one dictionary. Pure, and any split of the same work gives the same figures.

One worker's result of one piece of work is a dict: `num_samples`, `batch_count`, metrics, `last_` metrics.
`over_workers` merges the ranks of one piece; `over_pieces` chains the pieces of a call that was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

__all__ = ["COMMITTED", "SKIPPED", "completed", "over_pieces", "over_workers", "plain"]

SAMPLES = "num_samples"
BATCHES = "batch_count"
SKIPPED = "skipped_steps"
# Travels with a result, never shown: samples that all ranks together have committed, where the plan knows it.
COMMITTED = "__committed__"
Result = dict[str, Any]


def plain(value: Any) -> Any:
    """A Python number for anything that is a single number (NumPy, torch, TensorFlow); else the value itself."""
    if isinstance(value, (bool, int, float)) or value is None or isinstance(value, (str, bytes, Mapping)):
        return value
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:
        if hasattr(value, "numpy") and not hasattr(value, "item"):
            value = value.numpy()
        return value.item() if hasattr(value, "item") else value
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


def _weight(result: Mapping[str, Any]) -> float:
    samples: Any = result.get(SAMPLES)
    return float(samples) if _is_number(samples) and samples == samples else 1.0


def _mean(pairs: Sequence[tuple[Any, float]]) -> Any:
    """Sample-weighted mean. A NaN stays a NaN: it is news, not noise."""
    total = sum(weight for _, weight in pairs)
    if total == 0:
        return float(sum(value for value, _ in pairs)) / len(pairs)
    return float(sum(value * weight for value, weight in pairs if weight)) / total


def over_workers(results: Sequence[Mapping[str, Any]]) -> Result:
    """One piece of work, merged over its ranks.

    `num_samples` is summed; `epoch` and `batch_count` are the largest; other numbers are means weighted by
    samples, over the ranks that have them; anything else is the first rank's. `epoch` comes first.
    """
    rows = [{key: plain(value) for key, value in result.items()} for result in results if result]
    if not rows:
        return {}
    merged: Result = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        holders = [row for row in rows if key in row]
        numbers = [(row[key], _weight(row)) for row in holders if _is_number(row[key])]
        if len(numbers) < len(holders):
            merged[key] = holders[0][key]
        elif key == SAMPLES:
            merged[key] = sum(value for value, _ in numbers)
        elif key in ("epoch", BATCHES, SKIPPED, COMMITTED):
            merged[key] = max(value for value, _ in numbers)
        else:
            merged[key] = _mean(numbers)
    return _ordered(merged)


def over_pieces(pieces: Sequence[Mapping[str, Any]]) -> Result:
    """One call, chained from its pieces in order: counts add up, means are weighted by samples, `last_` is the last."""
    rows = [dict(piece) for piece in pieces if piece]
    busy = [row for row in rows if row.get(BATCHES) or row.get(SAMPLES)] or rows
    if not busy:
        return {}
    merged: Result = {}
    for key in dict.fromkeys(key for row in busy for key in row if key != COMMITTED):
        holders = [row for row in busy if key in row]
        numbers = [(row[key], _weight(row)) for row in holders if _is_number(row[key])]
        if len(numbers) < len(holders) or key.startswith("last_") or key == "epoch":
            merged[key] = holders[-1][key]
        elif key in (SAMPLES, BATCHES, SKIPPED):
            merged[key] = sum(value for value, _ in numbers)
        else:
            merged[key] = _mean(numbers)
    return _ordered(merged)


def completed(result: Result, pieces: Sequence[Mapping[str, Any]]) -> Result:
    """A call that lost workers counts the samples its plan knows were trained on, also those whose metrics were lost.

    Reports in other units (tokens, say) are larger than that, and left alone.
    """
    committed = max((piece.get(COMMITTED) or 0 for piece in pieces), default=0)
    if len(pieces) > 1 and _is_number(result.get(SAMPLES)) and committed > result[SAMPLES]:
        result = {**result, SAMPLES: committed}
    return result


def _ordered(result: Result) -> Result:
    head = [key for key in ("epoch", BATCHES, SAMPLES) if key in result]
    return {key: result[key] for key in [*head, *(key for key in result if key not in head)]}

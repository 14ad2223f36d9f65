"""The classes of `ray.train.callbacks.results_preprocessors`: a `TrainingCallback` with the
attribute `results_preprocessor` handles the rows that it returns. Driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from raysgd.core.metrics import plain

Rows = list[dict[str, Any]]


class ResultsPreprocessor:
    """Changes the rows of a report: one for each worker."""

    def preprocess(self, results: Rows) -> Rows:
        """Return the rows to handle in place of `results`."""
        return results


class SequentialResultsPreprocessor(ResultsPreprocessor):
    """Applies `preprocessors` one after another."""

    def __init__(self, preprocessors: Sequence[ResultsPreprocessor]) -> None:
        self.preprocessors = preprocessors

    def preprocess(self, results: Rows) -> Rows:
        for each in self.preprocessors:
            results = each.preprocess(results)
        return results


class ExcludedKeysResultsPreprocessor(ResultsPreprocessor):
    """Leaves out the values with these keys."""

    def __init__(self, excluded_keys: Iterable[str] | None = None) -> None:
        self.excluded_keys = frozenset(excluded_keys or ())

    def preprocess(self, results: Rows) -> Rows:
        return [{key: value for key, value in row.items() if key not in self.excluded_keys} for row in results]


class IndexedResultsPreprocessor(ResultsPreprocessor):
    """Selects the row of one worker, or the rows of several; of all of them by default."""

    def __init__(self, indices: int | Sequence[int] | None = None) -> None:
        self.indices = [indices] if isinstance(indices, int) else indices

    def preprocess(self, results: Rows) -> Rows:
        return results if self.indices is None else [results[index] for index in self.indices]


class AverageResultsPreprocessor(ResultsPreprocessor):
    """Adds the workers' mean of each of `keys`, by default of all, to all rows, as `avg(KEY)`. NaN
    and values that are not numbers are left out."""

    name, weight_key = "avg", ""

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = keys

    def preprocess(self, results: Rows) -> Rows:
        added, weights = {}, [_number(row.get(self.weight_key)) for row in results]
        if all(map(isnan, weights)):
            weights = [1.0] * len(results)
        for key in self.keys or dict.fromkeys(key for row in results for key in row):
            pairs = [(_number(row.get(key)), weight) for row, weight in zip(results, weights, strict=True)]
            if numbers := [pair for pair in pairs if not isnan(sum(pair))]:
                added[f"{self.name}({key})"] = self.of(numbers)
        return [{**row, **added} for row in results]

    def of(self, pairs: list[tuple[float, float]]) -> float:
        """Compute the number for these values and their weights."""
        return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


class MaxResultsPreprocessor(AverageResultsPreprocessor):
    """Adds the largest value of the workers, as `max(KEY)`."""

    name = "max"

    def of(self, pairs: list[tuple[float, float]]) -> float:
        return max(value for value, _ in pairs)


class WeightedAverageResultsPreprocessor(AverageResultsPreprocessor):
    """Adds the mean weighted by what the workers report as `weight_key`, if they do, as
    `weight_avg_WEIGHT_KEY(KEY)`."""

    def __init__(self, keys: Sequence[str] | None = None, weight_key: str = "") -> None:
        super().__init__(keys)
        self.weight_key, self.name = weight_key, f"weight_avg_{weight_key}"


def _number(value: Any) -> float:
    found = plain(value)
    return float(found) if isinstance(found, (int, float)) else float("nan")

"""The classes of `ray.train.callbacks.results_preprocessors`: a `TrainingCallback` with the
attribute `results_preprocessor` handles the rows that it returns. Driver."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from math import isnan, nan
from typing import Any

import numpy as np

logger = logging.getLogger("raysgd")

Rows = list[dict[str, Any]]
VALID = (int, float, np.float32, np.int32, np.int64)  # as in Ray: a float64 of NumPy is a float


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

    name, empty = "avg", nan  # of the added keys; the mean of no number

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys, self._logged = keys, set[Any]()

    def preprocess(self, results: Rows) -> Rows:
        added: dict[str, float] = {}
        weights = self.weights(results)
        for key in self.keys or dict.fromkeys(key for row in results for key in row):
            name = f"{self.name}({key})"
            values = self.numbers(key, results, f"{name} is not in the results")
            pairs = [pair for pair in zip(values, weights, strict=False) if not isnan(sum(pair))]
            added |= {name: self.of(pairs)} if values else {}
        return [{**row, **added} for row in results]

    def weights(self, results: Rows) -> list[float]:
        """Find the weight of each row."""
        return [1.0] * len(results)

    def numbers(self, key: Any, results: Rows, otherwise: str) -> list[float]:
        """Find each row's number with this key, or NaN. If no row has one, return nothing, and log
        what is done `otherwise`, once."""
        if any(isinstance(row.get(key), VALID) for row in results):
            return [float(row[key]) if isinstance(row.get(key), VALID) else nan for row in results]
        if key not in self._logged:
            self._logged.add(key)
            logger.warning("no worker has reported a number as %r, so %s. Report an int or a float", key, otherwise)
        return []

    def of(self, pairs: list[tuple[float, float]]) -> float:
        """Compute the number for these values and their weights."""
        total = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs) / total if total else self.empty


class MaxResultsPreprocessor(AverageResultsPreprocessor):
    """Adds the largest value of the workers, as `max(KEY)`."""

    name = "max"

    def of(self, pairs: list[tuple[float, float]]) -> float:
        return max((value for value, _ in pairs), default=nan)


class WeightedAverageResultsPreprocessor(AverageResultsPreprocessor):
    """Adds the mean weighted by what the workers report as `weight_key`, if they do, as
    `weight_avg_WEIGHT_KEY(KEY)`. It is 0.0 if the weights are."""

    empty = 0.0

    def __init__(self, keys: Sequence[str] | None = None, weight_key: str | None = None) -> None:
        super().__init__(keys)
        self.weight_key, self.name = weight_key, f"weight_avg_{weight_key}"

    def weights(self, results: Rows) -> list[float]:
        return self.numbers(self.weight_key, results, "all workers have equal weights") or super().weights(results)

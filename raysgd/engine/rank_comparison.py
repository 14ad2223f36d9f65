"""Decide when the ranks' weights are compared, and what follows from a difference. Driver."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from raysgd.config import ElasticConfig
from raysgd.core.rank_comparison import compare, describe
from raysgd.errors import DivergenceError

logger = logging.getLogger("raysgd")

# After a call, ranks are compared when they have trained this long since the last comparison, and so long that it took at most this
# part of the time.
TRAINED_S, LARGEST_SHARE = 1.0, 0.005
GROWN = 10.0


class Comparison:
    """Owns how long the ranks have trained since they were compared, and which differences were
    logged: each again when it is ten times as large, or was away."""

    def __init__(self, elastic: ElasticConfig) -> None:
        self.by_steps = elastic.compare_every is not None
        self._after_calls, self._then = elastic.compare_weights == "call", elastic.on_divergence
        self._trained_s, self._took_s = math.inf, 0.0  # so that the first call is compared
        self._logged: dict[tuple[str, str], float] = {}
        self.turn = 0  # how many comparisons there were

    def trained(self, seconds: float) -> None:
        """Note how long a call has trained."""
        self._trained_s += seconds

    @property
    def is_due(self) -> bool:
        """Return whether the ranks should be compared now that a call has ended."""
        return self._after_calls and self._trained_s >= max(TRAINED_S, self._took_s / LARGEST_SHARE)

    def took(self, seconds: float) -> None:
        """Note how long asking the ranks took. Once, it may be slow for another reason."""
        self._took_s = min(seconds, 2 * self._took_s) if self.turn else seconds
        self._trained_s = 0.0
        self.turn += 1

    def judge(self, step: int, texts: Mapping[int, str]) -> tuple[frozenset[int], str]:
        """Compare what the ranks reported after a step. Return the ranks to evict, and why; log a
        difference, or raise DivergenceError, if that is what the user wants."""
        found = compare(texts)
        text = describe(found, step) if found else ""
        if found and self._then == "raise":
            raise DivergenceError(text)
        if found and self._then == "evict":
            (worst, *others) = found
            if others or worst.kind != "weights":
                raise DivergenceError(
                    f"{text}. No rank is evicted, because replacement workers would run the same code"
                )
            if worst.outliers is None:
                raise DivergenceError(
                    f"{text}. No rank is evicted, because no more than half of the ranks are equal, so it is not known which are "
                    "right: load a checkpoint that was saved before"
                )
            return worst.outliers, f"its weights differ from those of most ranks after step {step}: {text}"
        sizes: dict[tuple[str, str], float] = {
            (each.kind, each.name if each.kind == "settings" else ""): each.size for each in found
        }
        if any(size > GROWN * self._logged.get(key, 0.0) for key, size in sizes.items()):
            logger.warning("%s", text)
            self._logged |= sizes
        self._logged = {key: size for key, size in self._logged.items() if key in sizes}
        return frozenset(), ""

"""Decide after which calls the ranks' weights are compared, and what follows from a difference.
Driver."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from raysgd.config import ElasticConfig
from raysgd.core.rank_comparison import CAUSES, difference
from raysgd.errors import DivergenceError

logger = logging.getLogger("raysgd")

LARGEST_SHARE = 0.005  # of the time that the ranks train, for comparisons


class Comparison:
    """Owns how long the ranks have trained since they were compared, and whether a difference was
    logged."""

    def __init__(self, elastic: ElasticConfig) -> None:
        self._raises = elastic.on_divergence == "raise"
        self._trained_s, self._took_s = math.inf, 0.0  # so that the first call is compared
        self._logged = False

    def note_training(self, seconds: float) -> None:
        """Note how long a call has trained."""
        self._trained_s += seconds

    @property
    def is_due(self) -> bool:
        """Whether the ranks should be compared now that a call has ended."""
        return self._trained_s >= self._took_s / LARGEST_SHARE

    def note_change(self) -> None:
        """Note that user code has changed the state between two calls."""
        self._trained_s = math.inf

    def note_asking(self, seconds: float) -> None:
        """Note how long asking the ranks took. Once, it may be slow for another reason."""
        self._took_s = min(seconds, 2 * self._took_s or seconds)
        self._trained_s = 0.0

    def judge(self, step: int, texts: Sequence[str]) -> None:
        """Compare what the ranks, in this order, have reported after a step. Log a difference, or
        raise DivergenceError, if the user wants that."""
        found = difference(texts)
        text = f"after step {step} the ranks do not train the same model: the parameter {found}. {CAUSES}"
        if found and self._raises:
            raise DivergenceError(text)
        if found and not self._logged:
            self._logged = True
            logger.warning("%s", text)

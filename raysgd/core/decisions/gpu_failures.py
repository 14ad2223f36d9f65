"""Remember which GPUs have failed, and which of them workers must not use any more. Driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Gpu = tuple[str, str]  # its node, and its number there

# What breaks again in another process is broken for good.
MOST_FAILURES = 2


class GpuFailures:
    """Owns the failures of GPUs.

    >>> failures = GpuFailures()
    >>> failures.note([("node", "3")]), failures.note([("node", "3")], known=1)
    (1, 2)
    >>> failures.exclude([("node", "3")]), failures.exclude([("node", "4")])
    (True, False)
    """

    def __init__(self) -> None:
        self._failures: Counter[Gpu] = Counter()

    def count(self, gpus: Iterable[Gpu]) -> int:
        """How often the one of these has failed that has failed most often."""
        return max((self._failures[gpu] for gpu in gpus), default=0)

    def note(self, gpus: Iterable[Gpu], *, known: int = 0) -> int:
        """Add a failure of these GPUs, which one worker had, and return how often they have failed.
        When the worker was set up, it was `known` times: others that share its GPU have failed with
        it, and that is one failure."""
        gpus = frozenset(gpus)
        if self.count(gpus) <= known:
            self._failures.update(gpus)
        return self.count(gpus)

    def exclude(self, gpus: Iterable[Gpu]) -> bool:
        """Whether no worker may use these GPUs."""
        return self.count(gpus) >= MOST_FAILURES

"""Remember which GPUs have failed, and which of them workers must not use any more. Driver."""

from __future__ import annotations

from collections.abc import Iterable

Gpu = tuple[str, str]  # its node, and its number there

# What breaks again in another process is broken for good.
MOST_FAILURES = 2


class GpuFailures:
    """Owns the failures of GPUs. Of one that a kernel of the user's may have caused, it also knows
    the step: if that comes again there, it was no failure of the GPU.

    >>> failures = GpuFailures()
    >>> failures.note([("node", "3")]), failures.note([("node", "3")], known=1)
    (1, 2)
    >>> failures.exclude([("node", "3")]), failures.exclude([("node", "4")])
    (True, False)
    """

    def __init__(self) -> None:
        self._failures: list[tuple[frozenset[Gpu], int | None]] = []

    @property
    def suspected(self) -> set[int]:
        """Return the steps at which a kernel of the user's may have caused a failure."""
        return {step for _, step in self._failures if step is not None}

    def count(self, gpus: Iterable[Gpu]) -> int:
        """Return how often the one of these has failed that has failed most often."""
        return max((sum(gpu in failed for failed, _ in self._failures) for gpu in gpus), default=0)

    def note(self, gpus: Iterable[Gpu], *, step: int | None = None, known: int = 0) -> int:
        """Add a failure of these GPUs, which one worker had, and return how often they have failed.
        When the worker started, it was `known` times: others that share its GPU have failed with
        it, and that is one failure."""
        gpus = frozenset(gpus)
        counted = self.count(gpus) > known
        self._failures.append((frozenset() if counted else gpus, step))
        return self.count(gpus)

    def acquit(self, step: int) -> None:
        """Forget the failures at this step, because the user's code has caused them."""
        self._failures = [failure for failure in self._failures if failure[1] != step]

    def exclude(self, gpus: Iterable[Gpu]) -> bool:
        """Return whether no worker may use these GPUs."""
        return self.count(gpus) >= MOST_FAILURES

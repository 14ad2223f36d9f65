"""Notice that the workers of a call do not divide one data set. Driver.

Replicas compare rows themselves when a group begins, and raise `OTHER_ROWS`. The driver warns of
what they do not compare: data that is registered later, and all with Horovod, whose replicas cannot
gather objects.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysgd.core.measures.metrics import Measured
from raysgd.replica.results import OTHER_ROWS


class RowsCheck:
    """Owns what each worker has said of its data in the call, and what was warned about."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, Mapping[str, str]]] = {}
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Forget what was said, because a call begins."""
        self._said.clear()

    def see(self, worker: str, rank: int, partial: Measured) -> list[str]:
        """Compare a report with those of other workers. Return warnings, once for each loader."""
        said = rank, partial.rows
        if self._said.get(worker) == said:
            return []
        self._said[worker] = said
        warnings = []
        for other in self._said.values():
            if other[0] == rank or other[1] == partial.rows:
                continue  # so that a report of one of a thousand ranks costs little
            (low, ours), (high, theirs) = sorted((said, other), key=lambda each: each[0])
            differ = {loader for loader in ours if ours[loader] != theirs.get(loader, ours[loader])}
            for loader in sorted(differ - self._warned):
                self._warned.add(loader)
                warnings.append(
                    OTHER_ROWS.format(loader=loader, low=low, high=high, ours=ours[loader], theirs=theirs[loader])
                )
        return warnings

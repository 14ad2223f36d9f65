"""Notice that the workers of a call do not divide one data set. Driver.

Replicas compare rows themselves when a group begins, and raise `OTHER`. The driver warns of what
they do not compare: batches, data that is registered later, and all with Horovod, whose replicas
cannot gather objects.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysgd.core.metrics import Measured

OTHER = (
    "each worker has made another split of the data: the {loader} has {theirs} on rank {high}, and {ours} on rank {low}. Some "
    "rows are used several times, and validations use rows of the training data. Let setup() make the same data on every worker, for "
    "example with random_split(..., generator=torch.Generator().manual_seed(0)), or pass seed=... to the trainer. If you divide the data "
    "yourself, pass add_dist_sampler=False"
)
SAME = (
    "ranks {low} and {high} have begun an epoch with the same batch of the {loader}. Each rank seems to read all of the data, so each "
    "sample is used several times. Divide the data among the ranks. An IterableDataset can use torch.utils.data.get_worker_info(), in "
    "which raysgd counts the ranks, or have a method shard(rank, world_size). Other iterables can use self.world_rank and "
    "self.world_size in setup. Ignore this if each rank should use all of the data"
)


class RowsCheck:
    """Owns what each worker has said of its data in the call, and what was warned about."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, Mapping[str, str], Mapping[str, str]]] = {}
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Forget what was said, because a call begins."""
        self._said.clear()

    def see(self, worker: str, rank: int, partial: Measured) -> list[str]:
        """Compare a report with those of other workers. Return warnings, once for each loader."""
        said = rank, partial.rows, partial.first
        if self._said.get(worker) == said:
            return []
        self._said[worker] = said
        found = []
        for other in self._said.values():
            if other[0] == rank or (other[1] == partial.rows and not (other[2] and partial.first)):
                continue  # so that a report of one of a thousand ranks costs little
            (low, ours, first), (high, theirs, second) = sorted((said, other), key=lambda each: each[0])
            differ = {loader for loader in ours if ours[loader] != theirs.get(loader, ours[loader])}
            same = {loader for loader in first if first[loader] == second.get(loader)}
            for loader in sorted((differ | same) - self._warned):
                self._warned.add(loader)
                text = OTHER if loader in differ else SAME
                rows = {"ours": ours.get(loader), "theirs": theirs.get(loader)}
                found.append(text.format(loader=loader, low=low, high=high, **rows))
        return found

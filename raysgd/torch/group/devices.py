"""Which GPUs a worker sees. Both."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.core.ranks import RankInfo

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> str:
    """The GPUs that Ray gave to this worker, as CUDA_VISIBLE_DEVICES lists them."""
    return os.environ.get(VISIBLE, "")


def shared_gpus(rank_infos: Sequence[RankInfo], offers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Find, for each rank, the GPUs of all ranks on its node in the order of ranks; each rank
    offers its own as "gpus".

    >>> shared_gpus([RankInfo(0, 2), RankInfo(1, 2, local_rank=1)], [{"gpus": "3,1"}, {"gpus": "1,2"}])
    ['3,1,2', '3,1,2']
    """
    nodes: dict[int, dict[str, None]] = {}
    for rank_info, offer in zip(rank_infos, offers, strict=True):
        gpus = nodes.setdefault(rank_info.node_rank, {})
        gpus.update(dict.fromkeys(gpu for gpu in str(offer["gpus"]).split(",") if gpu))
    return [",".join(nodes[rank_info.node_rank]) for rank_info in rank_infos]


def see_gpus(shared: str, mine: str) -> int:
    """Make these GPUs visible. Return the index of this rank's own first one among them.

    Only before CUDA is used in this process: later the variable means nothing.
    """
    os.environ[VISIBLE] = shared
    return shared.split(",").index(mine.split(",")[0]) if mine else 0


class OffersGpus:
    """The part of a backend that lets each worker see the GPUs of all workers on its node."""

    _gpus: str | None = None

    def offer(self) -> dict[str, Any]:
        """Offer the GPUs that Ray assigned. `join` makes those of the other workers visible too."""
        self._gpus = visible_gpus() if self._gpus is None else self._gpus
        return {"gpus": self._gpus}

"""Which GPUs a worker sees."""

from __future__ import annotations

import os
from typing import Any

from raysgd.rendezvous import RankInfo

__all__ = ["share_devices"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_devices(store: Any, rank_info: RankInfo) -> int:
    """Makes the GPUs of all ranks on this node visible, in the order of ranks; the index of this rank's own first one.

    Only before CUDA is used in this process: later the variable means nothing.
    """
    own = os.environ.get(VISIBLE, "")
    store.set(f"{rank_info.node_rank}/{rank_info.local_rank}", own)
    everybody = [store.get(f"{rank_info.node_rank}/{rank}").decode() for rank in range(rank_info.local_world_size)]
    union = list(dict.fromkeys(gpu for ids in everybody for gpu in ids.split(",") if gpu))
    os.environ[VISIBLE] = ",".join(union)
    return union.index(own.split(",")[0]) if own else 0

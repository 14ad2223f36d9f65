"""Which GPUs a worker sees."""

from __future__ import annotations

import os
from typing import Any

from raysgd.rendezvous import Seat

__all__ = ["share_devices"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_devices(store: Any, seat: Seat) -> int:
    """Makes the GPUs of all ranks on this node visible, in the order of ranks; the index of this rank's own first one.

    Only before CUDA is used in this process: later the variable means nothing.
    """
    own = os.environ.get(VISIBLE, "")
    store.set(f"{seat.node_rank}/{seat.local_rank}", own)
    everybody = [store.get(f"{seat.node_rank}/{rank}").decode() for rank in range(seat.local_world_size)]
    union = list(dict.fromkeys(gpu for ids in everybody for gpu in ids.split(",") if gpu))
    os.environ[VISIBLE] = ",".join(union)
    return union.index(own.split(",")[0]) if own else 0

"""The way into a generation's store, where its ranks find each other, or hear that the meeting was called off."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from raysgd.rendezvous import Seat

__all__ = ["enter", "wait_for_all"]

FIRST_TRY_S = 0.5


def enter(settings: Mapping[str, Any], *, limit_s: float) -> Any:
    """The store stands before any rank is told of it. So one that nobody serves is of a meeting that is over, and a rank
    that comes late must not knock there until its time is up, as torch would: it looks again after a short try, and after
    longer ones."""
    try_s, deadline = FIRST_TRY_S, time.monotonic() + limit_s
    while True:
        left_s = max(deadline - time.monotonic(), FIRST_TRY_S)
        try:
            socket.create_connection((settings["host"], settings["port"]), timeout=left_s).close()
        except OSError as error:
            raise dist.DistNetworkError(f"the meeting of this generation is over, or out of reach: {error}") from error
        try:
            store = dist.TCPStore(settings["host"], settings["port"], None, False, timeout=_seconds(min(try_s, left_s)))  # type: ignore[attr-defined]
        except dist.DistNetworkError:
            if time.monotonic() > deadline:
                raise
            try_s *= 2
        else:
            store.set_timeout(_seconds(limit_s))
            return store


def wait_for_all(store: Any, seat: Seat, *, limit_s: float) -> None:
    """Until every rank is in the store, or the driver ends it. After this all are close together in time: a peer that
    one still waits for has died."""
    store.set(f"here-{seat.world_rank}", "")
    store.wait([f"here-{rank}" for rank in range(seat.world_size)], _seconds(limit_s))


def _seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)

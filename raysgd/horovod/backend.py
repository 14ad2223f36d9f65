"""How the ranks of the class face meet in Horovod, part, and are freed from an exchange that waits for somebody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.horovod.leaving import is_interruption, shut_down
from raysgd.horovod.rendezvous import MeetingPlace, enter
from raysgd.torch.process_group import TorchBackend
from raysgd.torch.sockets import Connections

__all__ = ["HorovodBackend"]

# Horovod's threads talk all the time, also while training code computes: silence means that a host is gone.
SILENCE_S = 30.0


class HorovodBackend:
    """Ranks meet twice: in a process group of torch's, for what the library asks of all ranks (an order of samples, a
    TorchMetrics value), and in Horovod, for gradients. The first meeting makes sure that all are alive in the second.

    On the driver: owns the meeting places. On a worker: owns the membership, and knows its sockets.
    """

    in_place = True
    needs_offers = False

    def __init__(self, *, host: str = "127.0.0.1", join_s: float = 60.0, collective_s: float = 540.0) -> None:
        self._control = TorchBackend("gloo", host=host, join_s=join_s, collective_s=collective_s)
        self._silence_s = min(SILENCE_S, collective_s)
        self._place = MeetingPlace(host, wait_s=self._silence_s)
        self._connections = Connections()

    def offer(self) -> dict[str, Any]:
        return {}

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        pairs = zip(self._control.plan(rank_infos), self._place.open(rank_infos), strict=True)
        return [{"control": control, "environment": environment} for control, environment in pairs]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._control.join(rank_info, settings.get("control", {}))
        enter(settings.get("environment", {}))
        self._connections.opening()
        try:
            _init()
        finally:
            self._connections.opened()

    def leave(self) -> None:
        shut_down(self._connections.shut, limit_s=self._silence_s + 10)
        self._connections.forget()
        self._control.leave()

    def abort(self) -> None:
        """Horovod's thread falls out of what it waits for, and takes the training thread's wait with it."""
        self._connections.shut()
        self._control.abort()

    def collectives(self) -> int:
        return -1  # most of them are Horovod's, which does not count

    def is_interruption(self, error: BaseException) -> bool:
        return is_interruption(error) or self._control.is_interruption(error)


def _init() -> None:
    import horovod.torch as hvd

    try:
        hvd.init()
    except ValueError:
        hvd.shutdown()  # ends its thread, so that the next generation can begin one
        raise

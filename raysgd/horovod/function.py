"""How the ranks of a training function meet in Horovod: the function says `hvd.init()`, and finds all it needs around it."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.horovod import foreign
from raysgd.horovod.leaving import is_interruption, shut_down
from raysgd.horovod.rendezvous import MeetingPlace, enter, say_over
from raysgd.torch.devices import see_gpus, shared_gpus, visible_gpus
from raysgd.torch.sockets import Connections

__all__ = ["HorovodMeeting"]


class HorovodMeeting:
    """On the driver: owns the meeting places. On a worker: owns what the environment says of this generation, and knows
    the sockets that the function's `hvd.init()` opens.

    Workers of one node see all of its workers' GPUs, as scripts that say `set_device(hvd.local_rank())` expect.
    `wait_s` bounds what Horovod waits for: the others in `hvd.init()`, and a host that falls silent.
    """

    in_place = True

    def __init__(self, *, host: str, wait_s: float, interface: str | None = None, use_gpu: bool = False) -> None:
        self._wait_s, self._interface, self.needs_offers = wait_s, interface, use_gpu
        self._gpus: str | None = None
        self._place = MeetingPlace(host, wait_s=wait_s)
        self._environment: dict[str, str] = {}
        self._connections = Connections()

    def offer(self) -> dict[str, Any]:
        """The GPUs that Ray gave: joining a generation makes others visible."""
        self._gpus = visible_gpus() if self._gpus is None else self._gpus
        return {"gpus": self._gpus}

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        gpus = shared_gpus(rank_infos, offers) if self.needs_offers else [None] * len(rank_infos)
        places = self._place.open(rank_infos)
        return [{"environment": place, "gpus": shared} for place, shared in zip(places, gpus, strict=True)]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._environment = settings.get("environment", {})
        enter(self._environment, interface=self._interface)
        watch_init(self._connections)
        if settings.get("gpus") is not None and not _uses_cuda():
            see_gpus(settings["gpus"], self.offer()["gpus"])

    def leave(self) -> None:
        shut_down(self._connections.shut, limit_s=self._wait_s + 10)
        self._connections.forget()

    def abort(self) -> None:
        """Frees the function from an exchange, and everybody from `hvd.init()`."""
        self._connections.shut()
        if self._environment:
            threading.Thread(target=say_over, args=(self._environment,), daemon=True).start()

    def collectives(self) -> int:
        return -1  # Horovod does not count

    def is_interruption(self, error: BaseException) -> bool:
        return is_interruption(error)


def _uses_cuda() -> bool:
    """From then on it is too late to change what is visible."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def watch_init(connections: Connections) -> None:
    """Lets every later `hvd.init()` in this process note its sockets, whichever framework's it is, and whether it is
    imported yet."""
    basics = foreign.basics()
    plain = inspect.unwrap(basics.init)

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        connections.opening()
        try:
            return plain(self, *args, **kwargs)
        finally:
            connections.opened()

    basics.init = init
    for name, module in list(sys.modules.items()):
        bound = getattr(module, "init", None) if name.startswith("horovod.") else None
        if inspect.ismethod(bound) and isinstance(bound.__self__, basics):
            module.init = types.MethodType(init, bound.__self__)  # type: ignore[attr-defined]

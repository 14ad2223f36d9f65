"""How torch ranks meet, part, and are freed from a collective that waits for somebody who is gone."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.rendezvous import Seat

__all__ = ["TorchBackend"]

# gloo raises plain RuntimeErrors: only its own file names in the text tell them from a user's.
GLOO = re.compile(
    r"gloo/(transport|rendezvous|context|algorithm|allreduce|broadcast|common)|ProcessGroupGloo|\bgloo\b.*[Tt]imed out"
)


class TorchBackend:
    """On the driver: owns the store of the generation that stands (its port is bound, not guessed, and it is new each
    time). On a worker: owns the membership of the default process group, and knows its sockets."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        join_s: float = 60.0,
        collective_s: float = 540.0,
        in_place: bool = True,
    ) -> None:
        self.name, self.in_place = name, in_place
        self._host, self._join_s, self._collective_s = host, join_s, collective_s
        self._store: Any = None
        self._before: set[str] | None = None
        self._sockets: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_before": None, "_sockets": set()}

    # -- driver ---------------------------------------------------------------------------------------

    def plan(self, seats: Sequence[Seat]) -> list[dict[str, Any]]:
        self._store = None  # closes the old one: whoever still waits in it is freed
        if not seats:
            return []
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, None, True, timeout=datetime.timedelta(seconds=self._join_s), wait_for_workers=False
        )
        return [{"host": self._host, "port": self._store.port} for _ in seats]

    # -- worker ---------------------------------------------------------------------------------------

    def join(self, seat: Seat, settings: dict[str, Any]) -> None:
        self._before = _socket_names()
        try:
            store = dist.HashStore() if seat.solo else self._client(settings)  # type: ignore[attr-defined]
            name = "gloo" if seat.solo and self.name == "gloo" else self.name
            dist.init_process_group(
                name,
                store=dist.PrefixStore(f"generation-{seat.generation}", store),  # type: ignore[attr-defined]
                rank=seat.world_rank,
                world_size=seat.world_size,
                timeout=datetime.timedelta(seconds=self._collective_s),
            )
            # The first collective makes every connection now, where its failure belongs to the meeting.
            dist.all_reduce(torch.zeros(1, device="cuda" if self.name == "nccl" else "cpu"))
            self._sockets = _socket_names() - self._before
        finally:
            self._before = None

    def _client(self, settings: dict[str, Any]) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            settings["host"], settings["port"], None, False, timeout=datetime.timedelta(seconds=self._join_s)
        )

    def leave(self) -> None:
        self.abort()
        self._sockets = set()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a group that broke may refuse an orderly end
                dist.destroy_process_group()

    def abort(self) -> None:
        """gloo has no abort that frees a waiting collective; shutting its sockets down does, within a millisecond."""
        if self.name == "nccl" and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
        before = self._before
        names = self._sockets if before is None else _socket_names() - before
        for connection in _open_sockets(names):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def is_interruption(self, error: BaseException) -> bool:
        """By type where torch gives one; a user's exception that was raised while handling one counts too."""
        seen: BaseException | None = error
        for _ in range(10):
            if seen is None:
                return False
            if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and GLOO.search(str(seen))):
                return True
            seen = seen.__cause__ or seen.__context__
        return False


def _socket_names() -> set[str]:
    """This process's sockets, as the kernel names them ("socket:[inode]"): copies of a descriptor share a name."""
    return set(_descriptors())


def _descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[name] = int(descriptor)
    return found


def _open_sockets(names: set[str]) -> Iterator[socket.socket]:
    """The connected ones of these sockets, as copies. Listening ones are left alone: gloo takes their end as fatal."""
    for name, descriptor in _descriptors().items():
        if name not in names:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield connection

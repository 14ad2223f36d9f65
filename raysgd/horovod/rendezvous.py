"""Where Horovod's ranks find each other: a small server beside the driver, and what each rank's environment says."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.horovod.board_server import OVER, BoardServer

__all__ = ["MeetingPlace", "enter", "interface_towards", "places", "say_over"]

ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
INTERFACE = "HOROVOD_GLOO_IFACE"


def places(rank_infos: Sequence[RankInfo]) -> list[dict[str, str]]:
    """Each rank's place, in Horovod's words. A cross rank counts the nodes, among those that have this local rank.

    >>> [place["HOROVOD_CROSS_RANK"] for place in places([RankInfo(0, 2), RankInfo(1, 2, node_rank=1)])]
    ['0', '1']
    """
    found = []
    for rank_info in rank_infos:
        across = sorted(other.node_rank for other in rank_infos if other.local_rank == rank_info.local_rank)
        found.append(
            {
                "HOROVOD_HOSTNAME": f"node-{rank_info.node_rank}",
                "HOROVOD_RANK": str(rank_info.world_rank),
                "HOROVOD_SIZE": str(rank_info.world_size),
                "HOROVOD_LOCAL_RANK": str(rank_info.local_rank),
                "HOROVOD_LOCAL_SIZE": str(rank_info.local_world_size),
                "HOROVOD_CROSS_RANK": str(across.index(rank_info.node_rank)),
                "HOROVOD_CROSS_SIZE": str(len(across)),
            }
        )
    return found


class MeetingPlace:
    """Driver: owns the server of the generation that stands. Each has a new one, since ranks leave their addresses under
    the same names every time; its port is bound, not guessed."""

    def __init__(self, host: str, *, wait_s: float) -> None:
        self._host, self._wait_s = host, wait_s
        self._server: BoardServer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_server": None}

    def open(self, rank_infos: Sequence[RankInfo]) -> list[dict[str, str]]:
        """The environment of each rank; the old server is closed."""
        self.close()
        if not rank_infos:
            return []
        given = places(rank_infos)
        self._server = BoardServer(self._host, _sizes(given))
        port = self._server.port
        address = {
            **ALONE,
            # Horovod puts this between "http://" and its own path, and so sends the secret with every request.
            ADDRESS: f"{self._host}:{port}/{self._server.secret}",
            PORT: str(port),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(self._wait_s))),
        }
        return [{**place, **address} for place in given]

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _sizes(given: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """How many ranks there are in each of Horovod's scopes."""
    found: dict[str, int] = {}
    for place in given:
        found["global"] = int(place["HOROVOD_SIZE"])
        found[f"local_{place['HOROVOD_HOSTNAME']}"] = int(place["HOROVOD_LOCAL_SIZE"])
        found[f"cross_{place['HOROVOD_LOCAL_RANK']}"] = int(place["HOROVOD_CROSS_SIZE"])
    return found


def enter(environment: Mapping[str, str], *, interface: str | None = None) -> None:
    """Worker: takes its place. With nothing in it, one of its own: Horovod then meets nobody."""
    for name in (*places([RankInfo()])[0], ADDRESS, PORT):
        os.environ.pop(name, None)
    os.environ.update(environment or ALONE)
    # That a peer is gone is told by the trainer; Horovod would print it once more, on every rank.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    if environment and (INTERFACE not in os.environ or interface is not None):
        os.environ[INTERFACE] = interface or interface_towards(_host(environment), int(environment[PORT]))


def interface_towards(host: str, port: int) -> str:
    """The network interface that this machine uses to reach the driver: peers reach it there too."""
    import psutil  # Horovod needs it as well

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.split("%")[0] == own for each in addresses):
            return str(name)
    raise RuntimeError(
        f"no network interface of this machine has the address {own}, from which the driver at {host} is reached: set "
        f"the environment variable {INTERFACE} to the interface that the workers share"
    )


def say_over(environment: Mapping[str, str]) -> None:
    """Worker: this generation is over. Whoever still waits at its meeting place is told so; if the place is closed
    already, nobody does."""
    try:
        _ask(environment, "PUT", f"{OVER}/1", "1")
    except (OSError, http.client.HTTPException):
        return


def _host(environment: Mapping[str, str]) -> str:
    return environment[ADDRESS].partition("/")[0].partition(":")[0]


def _ask(environment: Mapping[str, str], method: str, path: str, content: str | None = None) -> tuple[int, bytes]:
    """Directly: a proxy for the web has no business here."""
    secret = environment[ADDRESS].partition("/")[2]
    connection = http.client.HTTPConnection(_host(environment), int(environment[PORT]), timeout=5)
    try:
        connection.request(method, f"/{secret}/{path}", body=content)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()

"""How Horovod's ranks find each other: a server on the driver, and their environment. Both."""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysgd.core.ranks import RankInfo
from raysgd.torch.group.interfaces import interface_towards

if TYPE_CHECKING:
    from raysgd.horovod.rendezvous_server import RendezvousServer

SINGLE_WORKER = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
INTERFACE = "HOROVOD_GLOO_IFACE"
ENDED = "raysgd-over"  # the scope of an entry that ends the rendezvous
END_S = 5.0


def rank_variables(rank_infos: Sequence[RankInfo]) -> list[dict[str, str]]:
    """Make the environment variables with each rank's ranks. A cross rank counts the nodes that
    have a worker with this local rank.

    >>> [rank["HOROVOD_CROSS_RANK"] for rank in rank_variables([RankInfo(0, 2), RankInfo(1, 2, node_rank=1)])]
    ['0', '1']
    """
    nodes: dict[int, list[int]] = {}
    for rank_info in rank_infos:
        nodes.setdefault(rank_info.local_rank, []).append(rank_info.node_rank)
    across = {
        local: {node: place for place, node in enumerate(sorted(node_ranks))} for local, node_ranks in nodes.items()
    }
    variables = []
    for rank_info in rank_infos:
        variables.append(
            {
                "HOROVOD_HOSTNAME": f"node-{rank_info.node_rank}",
                "HOROVOD_RANK": str(rank_info.world_rank),
                "HOROVOD_SIZE": str(rank_info.world_size),
                "HOROVOD_LOCAL_RANK": str(rank_info.local_rank),
                "HOROVOD_LOCAL_SIZE": str(rank_info.local_world_size),
                "HOROVOD_CROSS_RANK": str(across[rank_info.local_rank][rank_info.node_rank]),
                "HOROVOD_CROSS_SIZE": str(len(across[rank_info.local_rank])),
            }
        )
    return variables


class HorovodRendezvous:
    """Owns, on the driver, the server of the current generation: each has a new one, because ranks
    publish their addresses under the same names every time."""

    def __init__(self, host: str, *, wait_s: float) -> None:
        self._host, self._wait_s = host, wait_s
        self._server: RendezvousServer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_server": None}

    def open(self, rank_infos: Sequence[RankInfo]) -> list[dict[str, str]]:
        """Replace the server, and return each rank's environment. Without ranks, only close it."""
        self.close()
        if not rank_infos:
            return []
        from raysgd.horovod.rendezvous_server import RendezvousServer

        ranks = rank_variables(rank_infos)
        server = self._server = RendezvousServer(self._host, _sizes(ranks), ended=ENDED)
        shared = {
            **SINGLE_WORKER,
            # Horovod puts this between "http://" and its own path, and so sends the secret with every request.
            ADDRESS: f"{self._host}:{server.port}/{server.secret}",
            PORT: str(server.port),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(self._wait_s))),
        }
        return [{**rank, **shared} for rank in ranks]

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _sizes(ranks: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Count the ranks in each of Horovod's scopes."""
    sizes: dict[str, int] = {}
    for rank in ranks:
        sizes["global"] = int(rank["HOROVOD_SIZE"])
        sizes[f"local_{rank['HOROVOD_HOSTNAME']}"] = int(rank["HOROVOD_LOCAL_SIZE"])
        sizes[f"cross_{rank['HOROVOD_LOCAL_RANK']}"] = int(rank["HOROVOD_CROSS_SIZE"])
    return sizes


def set_environment(environment: Mapping[str, str], *, interface: str | None = None) -> None:
    """Set this worker's environment for `hvd.init()`; an empty one starts it alone."""
    for name in (*rank_variables([RankInfo()])[0], ADDRESS, PORT):
        os.environ.pop(name, None)
    os.environ.update(environment or SINGLE_WORKER)
    # The trainer reports failed peers. Horovod would print them again on every rank.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    if environment and (INTERFACE not in os.environ or interface is not None):
        os.environ[INTERFACE] = interface or interface_towards(_host(environment), variable=INTERFACE)


def end_rendezvous(environment: Mapping[str, str]) -> None:
    """Tell the server, from a worker, that this generation has ended. Ranks that are still waiting
    in `hvd.init()` fail then. If the server is closed already, no rank is waiting."""
    secret = environment[ADDRESS].partition("/")[2]
    # A direct connection, because a web proxy cannot reach the driver.
    connection = http.client.HTTPConnection(_host(environment), int(environment[PORT]), timeout=END_S)
    try:
        connection.request("PUT", f"/{secret}/{ENDED}/1", body="1")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()


def _host(environment: Mapping[str, str]) -> str:
    return environment[ADDRESS].partition("/")[0].partition(":")[0]

"""A port for TensorFlow's server, taken before the server starts: every rank's address must be
known by then. Both.

Standard library only, because training functions use it before TensorFlow is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from collections.abc import Sequence
from typing import Any

from raysgd.core.channel.network import address_towards
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.core.ranks import RankInfo

PORTS = (15000, 32000)
TRIES = 100


class NoFreePortError(OSError):
    """No port is free, or the driver's host cannot be reached from here."""


class HeldPort:
    """Owns a port that a server of this process can take after `release`.

    TensorFlow's server takes a number, not an open socket. So the port is held until the server
    starts, because other workers choose ports at the same time. It is below the range that systems
    use for outgoing connections. Nothing listens on it.
    """

    def __init__(self) -> None:
        for _ in range(TRIES):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):
                self._socket.bind(("", random.SystemRandom().randrange(*PORTS)))
                self.number: int = self._socket.getsockname()[1]
                return
            self._socket.close()
        raise NoFreePortError(f"no free port was found between {PORTS[0]} and {PORTS[1]}")

    def address_towards(self, host: str) -> str:
        """Find this machine's address, as `host` reaches it, with the port."""
        try:
            address = address_towards(host)
        except OSError as error:
            self.release()
            raise NoFreePortError(f"this machine has no address towards {host}: {error}") from error
        return f"[{address}]:{self.number}" if ":" in address else f"{address}:{self.number}"

    def release(self) -> None:
        self._socket.close()


class HeldPortBackend(ProcessGroupBackend):
    """What the backends of operators and of functions have in common. On a worker, owns the port
    for TensorFlow's server. A process can join TensorFlow's collectives only once, so `in_place` is
    False. Its calls return when they are done, or raise an error: `ensure_whole` has nothing to
    do."""

    in_place = False
    needs_offers = True

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._port: HeldPort | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_port": None}

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        return [{"addresses": [offer["address"] for offer in offers]} for _ in rank_infos]

    def offer(self) -> dict[str, Any]:
        self._release()
        self._port = HeldPort()
        return {"address": self._port.address_towards(self._host)}

    def _release(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None

    def _set_tf_config(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        task = {"type": "worker", "index": rank_info.world_rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": settings["addresses"]}, "task": task})

    def collectives(self) -> int:
        return -1  # they are inside graph functions, which do not count them

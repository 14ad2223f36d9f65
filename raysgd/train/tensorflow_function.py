"""Connects the ranks of a TensorFlow function: sets TF_CONFIG; the function creates the strategy. Both."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.errors import causes_of
from raysgd.tf.foreign import abort_collectives
from raysgd.tf.ports import HeldPort, NoFreePortError

__all__ = ["TensorflowFunctionBackend"]

# One of these is in the text of TensorFlow's errors when a peer has failed.
PEER_ERRORS = ("Collective", "CoordinationService", "/job:worker", "RecvBuf")


class TensorflowFunctionBackend:
    """Gives the ranks each other's addresses. On a worker: owns the port for the server that the function starts. A process
    can join TensorFlow's collectives only once, so after a worker failure the function runs again in new processes."""

    in_place = False
    needs_offers = True

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._port: HeldPort | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_port": None}

    def offer(self) -> dict[str, Any]:
        self.leave()
        self._port = HeldPort()
        return {"address": self._port.address_towards(self._host)}

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        return [{"addresses": [offer["address"] for offer in offers]} for _ in rank_infos]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self.leave()  # frees the port for the server that the function starts
        if rank_info.solo:
            return
        addresses = settings["addresses"]
        task = {"type": "worker", "index": rank_info.world_rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})

    def leave(self) -> None:
        """Release the port. Only the end of the process leaves the collectives."""
        if self._port is not None:
            self._port.release()
            self._port = None

    def abort(self) -> None:
        abort_collectives()

    def collectives(self) -> int:
        return -1  # they are inside graph functions, and cannot be counted

    def is_interruption(self, error: BaseException) -> bool:
        """Recognize the error, or one that caused it, by the names of TensorFlow's types and by the texts of its
        runtime."""
        for each in causes_of(error):
            if isinstance(each, NoFreePortError):
                return True
            if type(each).__module__.startswith("tensorflow") and any(text in str(each) for text in PEER_ERRORS):
                return True
        return False

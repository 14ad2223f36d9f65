"""How ranks of a TensorFlow function meet: TF_CONFIG tells everybody's address; the function makes the strategy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from raysgd.rendezvous import RankInfo
from raysgd.tf.meeting import MeetingFailed, MeetingPoint, meet, own_port

__all__ = ["TensorflowMeeting"]

UNAVAILABLE = 14
# The words of TensorFlow's collective runtime when a peer has gone.
WORDS = ("Collective", "CoordinationService", "/job:worker", "RecvBuf")


class TensorflowMeeting:
    """On the driver: owns the meeting point of the generation that stands. A process can enter TensorFlow's collectives
    only once, so after a loss the function runs again in fresh processes."""

    in_place = False

    def __init__(self, *, host: str, join_s: float) -> None:
        self._host, self._join_s = host, join_s
        self._point: MeetingPoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_point": None}

    def plan(self, rank_infos: Sequence[RankInfo]) -> list[dict[str, Any]]:
        if self._point is not None:
            self._point.close()
            self._point = None
        if not rank_infos:
            return []
        self._point = point = MeetingPoint(len(rank_infos))
        return [{"host": self._host, "port": point.port, "token": point.token} for _ in rank_infos]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        if rank_info.solo:
            return
        addresses = self.addresses(rank_info, settings)
        task = {"type": "worker", "index": rank_info.world_rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})

    def addresses(self, rank_info: RankInfo, settings: dict[str, Any]) -> list[str]:
        """Everybody's, in rank order; this rank's port is free for the server that the function will start."""
        with own_port() as port:
            return meet(**settings, rank=rank_info.world_rank, own=port, limit_s=self._join_s)

    def leave(self) -> None:
        """There is no way out but the end of the process."""

    def abort(self) -> None:
        context = sys.modules.get("tensorflow.python.eager.context")
        if context is not None and context.context()._initialized:
            context.context().abort_collective_ops(UNAVAILABLE, "a peer left this generation")

    def collectives(self) -> int:
        return -1  # they are inside of graph functions, and nobody counts them

    def is_interruption(self, error: BaseException) -> bool:
        """By the names of TensorFlow's types and the runtime's own words; also as the cause of another error."""
        seen: BaseException | None = error
        for _ in range(10):
            if seen is None:
                return False
            if isinstance(seen, MeetingFailed):
                return True
            if type(seen).__module__.startswith("tensorflow") and any(word in str(seen) for word in WORDS):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

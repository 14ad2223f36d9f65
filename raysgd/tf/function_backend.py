"""Connects the ranks of a TensorFlow function: sets TF_CONFIG for its strategy. Both."""

from __future__ import annotations

from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.errors import causes_of
from raysgd.tf.cluster_config import HeldPortBackend, NoFreePortError
from raysgd.tf.foreign import abort_collectives

# One of these is in the text of TensorFlow's errors when a peer has failed.
PEER_ERRORS = ("Collective", "CoordinationService", "/job:worker", "RecvBuf")


class TensorflowFunctionBackend(HeldPortBackend):
    """Gives the ranks each other's addresses. On a worker, owns the port for the server that the
    function starts. After a worker failure the function runs again in new processes."""

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._release()  # frees the port for the server that the function starts
        if not rank_info.solo:
            self._set_tf_config(rank_info, settings)

    def leave(self) -> None:
        """Release the port. Only the end of the process leaves the collectives."""
        self._release()

    def abort(self) -> None:
        abort_collectives()

    def is_interruption(self, error: BaseException) -> bool:
        """Recognize the error, or a cause of it, by TensorFlow's types and texts."""
        for each in causes_of(error):
            if isinstance(each, NoFreePortError):
                return True
            if type(each).__module__.startswith("tensorflow") and any(text in str(each) for text in PEER_ERRORS):
                return True
        return False

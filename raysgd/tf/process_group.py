"""How the ranks of TensorFlow operators form a process group, and how one is ended. Both."""

from __future__ import annotations

import logging
import signal
from typing import Any

import tensorflow as tf

from raysgd.core.ranks import RankInfo
from raysgd.errors import causes_of
from raysgd.tf import foreign
from raysgd.tf.channel import Channel
from raysgd.tf.cluster_config import HeldPortBackend, NoFreePortError

logger = logging.getLogger("raysgd")

HEARTBEAT_S = 10.0  # until a host that cannot be reached counts as failed; a process that ends is noticed at once
INTERRUPTIONS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
# User code can raise errors of these types, too (for a file on a network drive). Only the runtime uses these texts.
RUNTIME_TEXTS = ("Collective", "Coordination", "RecvBuf", "tasks are unhealthy", "Could not start gRPC server")


class TensorFlowBackend(HeldPortBackend):
    """On a worker, owns the port for TensorFlow's server, and the membership of TensorFlow's
    collective runtime. On the driver, it owns nothing."""

    def __init__(
        self, *, host: str = "127.0.0.1", join_s: float = 60.0, threads: int | None = None, use_gpu: bool = False
    ) -> None:
        super().__init__(host=host)
        self._join_s, self._threads, self._use_gpu = join_s, threads, use_gpu
        self._strategy: Any = None
        self._aborted = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_strategy": None}

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        if self._strategy is not None:
            raise RuntimeError(
                "TensorFlow's collectives cannot be set up twice in one process: a new process is needed"
            )
        prepare_runtime(self._threads, use_gpu=self._use_gpu)
        if rank_info.world_size == 1:
            self._release()
            return
        self._set_tf_config(rank_info, settings)
        foreign.set_coordination_limits(rank_info.world_size, join_s=self._join_s, heartbeat_s=HEARTBEAT_S)
        self._release()  # now, as the strategy starts the server
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # The runtime handles SIGTERM now. Restore the worker's handler, because SIGTERM is a preemption notice.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        # The first collective opens every connection, so that a failure of one is a failure to join.
        Channel(rank_info.world_size).sum([tf.zeros([1])])

    def leave(self) -> None:
        """Do nothing: only the end of the process leaves the group."""

    def abort(self) -> None:
        if self._strategy is not None:
            self._aborted = True
            foreign.abort_collectives()

    def is_interruption(self, error: BaseException) -> bool:
        """Whether a peer or the network failed, by the error's type and then its text. An error
        that was raised while such an error was handled counts, too."""
        return any(isinstance(each, NoFreePortError) or self._is_of_runtime(each) for each in causes_of(error))

    def _is_of_runtime(self, error: BaseException) -> bool:
        known = isinstance(error, INTERRUPTIONS)
        return known and (self._aborted or any(text in str(error) for text in RUNTIME_TEXTS))


def prepare_runtime(threads: int | None, *, use_gpu: bool) -> None:
    """Set the number of threads, and the visible GPUs, whose memory is allocated as it is needed.
    This is possible only before TensorFlow's first operation."""
    try:
        if not use_gpu:
            tf.config.set_visible_devices([], "GPU")
        for gpu in tf.config.get_visible_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError as error:
        logger.warning(
            "TensorFlow is already running in this process, so its threads and devices are not changed: %s", error
        )

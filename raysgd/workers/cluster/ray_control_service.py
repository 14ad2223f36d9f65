"""Query Ray's control service (GCS) with a time limit, in case it does not answer. Both."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from raysgd.errors import ClusterError, NotActiveError

T = TypeVar("T")

# Ray ends every process of its cluster, including this one, that has not reached the GCS for this long.
RAY_SETTING, RAY_DEFAULT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0


def gcs_limit_s() -> float:
    """The time limit for answers of the GCS: half of the time after which Ray ends this process, so
    that there is time left for `save()`."""
    return float(os.environ.get(RAY_SETTING, RAY_DEFAULT_S)) / 2


def require_ray(session: str | None = None) -> str:
    """Find the id of this process's connection to Ray. Raise `NotActiveError` if there is none, or
    if it is not `session`, because Ray's own functions would start a new cluster then."""
    import ray

    here = ray.get_runtime_context() if ray.is_initialized() else None
    # The first id distinguishes connections to one cluster, the second one clusters.
    now = f"{here.get_worker_id()} on {here.get_node_id()}" if here is not None else None
    if now is None or (session is not None and now != session):
        raise NotActiveError(
            "this process is no longer connected to the Ray cluster of the trainer's workers: ray.shutdown() was called, "
            "which ended the workers. To continue, create a new trainer, and load what you saved"
        )
    return now


class GcsQuery(Generic[T]):
    """Owns one call to the GCS, and the thread that makes it: Ray's client waits for the GCS
    without a limit, and even blocks Ctrl-C meanwhile."""

    def __init__(self, call: Callable[[], T]) -> None:
        require_ray()
        self._call = call
        self._answer = Future[T]()
        self._asked_at = time.monotonic()
        threading.Thread(target=self._ask, name="raysgd-gcs", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._answer.set_result(self._call())
        except BaseException as error:  # `result` raises it
            self._answer.set_exception(error)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._asked_at

    @property
    def answered(self) -> bool:
        return self._answer.done()

    def result(self, limit_s: float) -> T:
        """Wait for the answer. Raise `ClusterError` if there is none `limit_s` after the query."""
        if not wait([self._answer], max(limit_s - self.age_s, 0.0)).done:
            raise ClusterError(_unreachable(self.age_s))
        error = self._answer.exception()
        if type(error).__module__.split(".")[0] in ("ray", "grpc"):
            raise ClusterError(_unreachable(self.age_s)) from error
        return self._answer.result()


def ask(call: Callable[[], T], *, limit_s: float | None = None) -> T:
    """Call a function of Ray that asks the GCS. Raise `ClusterError` after the limit."""
    return GcsQuery(call).result(gcs_limit_s() if limit_s is None else limit_s)


def _unreachable(waited_s: float) -> str:
    where = _address()
    return (
        f"Ray's control service (the GCS{f' at {where}' if where else ''}) has not answered for {waited_s:.0f} s. Without "
        "it no worker can be replaced, and Ray ends every process that has not reached it for "
        f"{2 * gcs_limit_s():.0f} s, including this one ({RAY_SETTING}). If the workers are alive, "
        "save() still works until then; earlier checkpoints are intact. Restart the cluster, and load into a new trainer"
    )


def _address() -> Any:
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None

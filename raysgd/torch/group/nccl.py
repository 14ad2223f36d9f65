"""How a worker uses NCCL: torch's settings for it, its groups, the wait for the device, and the end
of calls in which a peer has failed. Worker.

A collective call of NCCL's returns when it is launched, and the device makes it later. If a peer
has failed, the device waits for it, and only an abort ends that: with a part of the sum in the
buffer, and without an error anywhere. So the code that uses what was received waits for the device
first, and then looks whether there was an abort. That order is right because the abort is noted
before it begins, and because nothing else completes a call that a peer has left. Later, a fused
optimizer could look on the device instead of waiting here, at an element of each reduced bucket, as
it does at `found_inf`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.torch.foreign import abort_groups

logger = logging.getLogger("raysgd")

NAME = "nccl"
STUCK = 80  # the exit status of a process whose abort has not ended
ABORT_S, SPREAD_S = 20.0, 100.0
# torch's own watchdog must not end what raysgd is about to repair: on an error of a peer's connection it sleeps for a minute,
# and then ends the process, also if the abort was long ago. It still ends a process whose device is broken.
VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
}


def set_variables() -> None:
    """Set how torch treats failures of NCCL. It reads this when it makes the first group."""
    os.environ.update(VARIABLES)


def device() -> torch.device:
    """The device whose tensors NCCL sends: the CPU, if NCCL is emulated there."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def wait_for_device() -> None:
    """Wait until the device has computed all that was launched. The watchdog knows this function by
    its name: a rank in it waits for its peers."""
    where = device()
    if where.type != "cpu":
        torch.get_device_module(where).current_stream().synchronize()


def form(**arguments: Any) -> None:
    """Form the default group. With the device's number, torch connects the ranks now, and divides
    the group for further ones."""
    where = device()
    dist.init_process_group(NAME, device_id=where if where.type == "cuda" else None, **arguments)


def use() -> None:
    """Make the first collective call, because a connection that fails later is no failure to
    join."""
    used = torch.zeros(1, device=device())
    dist.all_reduce(used)
    used.item()


def abort_limit_s(rank: int, ranks: int) -> float:
    """How long this rank waits for the end of an abort, until it ends its process. NCCL can hang in
    it, and then perhaps on all ranks. So the ranks end one after the other, because the end of one
    can free the others, and the last one keeps the state for longest. The only survivor of two has
    the state alone.

    >>> abort_limit_s(0, 3), abort_limit_s(1, 3), abort_limit_s(2, 3), abort_limit_s(0, 2)
    (20.0, 70.0, 120.0, 120.0)
    """
    return ABORT_S + SPREAD_S * (rank / (ranks - 1) if ranks > 2 else 1.0)


class Abort:
    """Ends the calls of one generation's groups, once, on a thread of its own: the control thread
    must answer meanwhile. `wait` is for the main thread, before it leaves the groups. What arrived
    after an abort was `noted` may be incomplete."""

    noted = False

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._begun = False

    def __reduce__(self) -> tuple[type[Abort], tuple[()]]:
        return Abort, ()

    def begin(self, groups: Sequence[Any], *, limit_s: float) -> None:
        with self._lock:
            begun, self._begun = self._begun, True
        if not begun:
            threading.Thread(target=self._run, args=(groups,), name="raysgd-abort", daemon=True).start()
            threading.Thread(target=self._watch, args=(limit_s,), name="raysgd-abort-limit", daemon=True).start()

    def wait(self) -> None:
        """Wait until it has ended, if it was begun. If it does not end, this process does."""
        if self._begun:
            self._ended.wait()

    def _run(self, groups: Sequence[Any]) -> None:
        try:
            abort_groups(groups)
        finally:
            self._ended.set()

    def _watch(self, limit_s: float) -> None:
        if not self._ended.wait(limit_s):
            logger.critical(
                "NCCL has not ended its calls within %g s after a peer had failed. This process ends now, so that the other ranks "
                "can continue. raysgd starts a replacement",
                limit_s,
            )
            os._exit(STUCK)

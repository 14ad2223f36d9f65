"""How a rank leaves Horovod, also when a peer is gone; and which errors say that one is."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable

__all__ = ["is_interruption", "shut_down"]

GRACE_S = 1.0
FRAMEWORKS = ("horovod.torch", "horovod.tensorflow", "horovod.mxnet")

# All that goes wrong between ranks is one type of error. These are mistakes in a program, whoever is there.
MISTAKES = re.compile(r"^(Mismatched|Duplicate|Requested|Process-set rank zero)|not supported|received invalid")
NOT_MET = "Horovod initialization failed"

_one_at_a_time = threading.Lock()  # two threads that join Horovod's own would be undefined behaviour


def shut_down(cut: Callable[[], None], *, limit_s: float) -> None:
    """Out of Horovod. All ranks leave together as soon as one does; where a peer does not answer, the connections are
    `cut` after a moment. They are cut at the end in any case: Horovod leaves them open, and others may wait on them."""
    thread = threading.Thread(target=_shut_down, name="horovod-shutdown", daemon=True)
    thread.start()
    thread.join(GRACE_S)
    cut()
    thread.join(limit_s)


def _shut_down() -> None:
    with _one_at_a_time:
        for name in FRAMEWORKS:
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "shutdown"):
                module.shutdown()


def is_interruption(error: BaseException) -> bool:
    """Does this error say that a peer went away?"""
    exceptions = sys.modules.get("horovod.common.exceptions")
    if exceptions is None:
        return False
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, exceptions.HorovodInternalError):
            return not MISTAKES.search(str(seen))
        if isinstance(seen, ValueError) and NOT_MET in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False

"""Measure how long the parts of a training step take. Standard library only. Both."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

WINDOW = 10
NOTHING = nullcontext()


class Timers:
    """Owns the newest durations of blocks, by name, while it is `enabled`."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self.enabled = True

    def reset(self) -> None:
        self._seconds.clear()

    def record(self, key: str) -> AbstractContextManager[object]:
        """Time a block: `with self.timers.record("fwd"): ...`."""
        if not self.enabled:
            return NOTHING
        lap, block = self.laps(), ExitStack()  # and no generator, which would set the traceback of the user's error
        block.callback(lap, key)
        return block

    def laps(self) -> Callable[[str], None]:
        """Make a function to call with its name after each part of a block that runs often: it
        records the time since its last call, at a third of the cost of `record`. Only while
        `enabled`."""
        began = time.perf_counter()

        def lap(key: str) -> None:
            nonlocal began
            now = time.perf_counter()
            self._seconds.setdefault(key, deque(maxlen=WINDOW)).append(now - began)
            began = now

        return lap

    def stats(self) -> dict[str, float]:
        """The mean of the last 10 durations of each block as `mean_<key>_s`."""
        return {f"mean_{key}_s": statistics.fmean(seconds) for key, seconds in self._seconds.items()}

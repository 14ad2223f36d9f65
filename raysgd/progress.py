"""How far a rank has got, and the desk where a running call hears that it should stop.

Committed means: the optimizer's step of that batch is applied. Ranks of one generation can differ by one step,
because one may have finished its all-reduce when another's peer died.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.core.messages import FunctionReport, SnapshotUpload, StartDealer

__all__ = ["Control", "Progress", "most_advanced"]


@dataclass(frozen=True)
class Progress:
    """Committed counts of one rank. `step` grows for ever; the other counts belong to the running call.

    `expected` is how many batches the call will have, where that is known (0 otherwise).
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    expected: int = 0
    finished: bool = False
    phase: str = "idle"
    applied: int = 0
    loads: int = 0

    @property
    def order(self) -> tuple[int, int, int, int, bool]:
        """Sorts ranks by how much they have committed; `applied` tells apart ranks inside one batch. What the user
        loaded last comes before all that was trained until then."""
        return (self.loads, self.step, self.applied, self.epoch, self.finished)

    def at(self, phase: str) -> Progress:
        return replace(self, phase=phase)


def most_advanced(progress: dict[str, Progress]) -> str:
    """The worker whose state the others take; the first one (the lowest rank) of equals."""
    return max(progress, key=lambda worker: progress[worker].order)


REMEMBERED_STEPS = 16
MIN_INTERVAL_S, MAX_INTERVAL_S, REPORTS_PER_S = 0.1, 0.5, 40

Uploader = Callable[["SnapshotUpload", Any], None]
Deliverer = Callable[["FunctionReport | StartDealer", Any], None]
Publisher = Callable[[Progress, dict[str, Any] | None], None]


def _ignore_progress(progress: Progress, partial: dict[str, Any] | None) -> None:
    """The publisher of a replica that nobody watches."""


def _ignore_message(message: FunctionReport | StartDealer, body: Any) -> None:
    """Where messages of such a replica go."""


class Control:
    """Where the thread that trains meets the thread that listens.

    Owns: the stop signs of one worker, its phase (for a hang's report) and the last published progress. `upload`
    sends a snapshot to the driver, where there is one that wants it; `deliver` sends a message that must not be lost,
    and returns when the driver has it; `on_interrupt` is called on the listener's thread. `begun_after` says of the newest
    steps how many collective calls had been made when each began, by `collectives`. Never blocks the listener, and costs
    the training thread one attribute read per batch while nothing is asked of it.

    A planned stop is agreed on in two phases. The listener sets `stop_at` and then reads `begun`; the trainer
    writes `begun` and then reads `stop_at`. So at least one of them sees the other, and a proposal that came
    too late is refused (`propose` returns False) instead of being half kept. A trainer that reaches the agreed
    step waits until the driver has everybody's consent (`confirm`), moves the border, or interrupts.
    """

    def __init__(
        self,
        publish: Publisher = _ignore_progress,
        *,
        interval_s: float = MIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
    ) -> None:
        self.attention = False
        self.begun = 0
        self.notice = False
        self.phase = "idle"
        self.batch = 0
        self.upload: Uploader | None = None
        self.deliver: Deliverer = _ignore_message
        self.on_interrupt: Callable[[], None] = lambda: None
        self.collectives: Callable[[], int] = lambda: -1
        self.begun_after: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._publish = publish
        self._interval_s = interval_s
        self._next_publish = 0.0
        self._stop_at: int | None = None
        self._confirmed = False
        self._interrupted = False
        self._clock, self._changed = clock, changed or threading.Condition()
        self.progress = Progress()

    # -- the listener's side --------------------------------------------------------------------------

    def propose(self, step: int) -> bool:
        """Asks to stop before step number `step` + 1 begins; False when that step has begun already."""
        with self._changed:
            self._stop_at, self._confirmed, self.attention = step, False, True
            self._changed.notify_all()
        return self.begun <= step

    def confirm(self) -> None:
        """Everybody agreed: the rank that stands at the border may leave its loop."""
        with self._changed:
            self._confirmed = True
            self._changed.notify_all()

    def interrupt(self) -> None:
        """The generation is over: stop at the next border, whatever was agreed."""
        with self._changed:
            self._interrupted = self.attention = True
            self._changed.notify_all()
        self.on_interrupt()

    def withdraw(self) -> None:
        """The planned stop is off: whoever stands at the border goes on."""
        with self._changed:
            self._stop_at, self._confirmed = None, False
            self._changed.notify_all()

    def clear(self) -> None:
        """A new call or generation begins: old signs mean nothing any more."""
        with self._changed:
            self._stop_at, self._confirmed, self._interrupted, self.attention = None, False, False, False
            self.begun_after.clear()

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    # -- the trainer's side ---------------------------------------------------------------------------

    def begin(self, step: int) -> bool:
        """Called before each batch with its step number; False means: do not begin it, leave the loop."""
        self.begun_after.append((step, self.collectives()))
        self.begun = step
        if not self.attention:
            return True
        with self._changed:
            while not self._interrupted and self._stop_at is not None and step > self._stop_at:
                self.begun = step - 1
                if self._confirmed:
                    return False
                self._changed.wait(0.5)
            if self._interrupted:
                self.begun = step - 1
                return False
            self.begun = step
        return True

    def set_world_size(self, ranks: int) -> None:
        """A generation stands. Its driver hears some forty reports a second, from however many ranks."""
        self._interval_s = min(max(MIN_INTERVAL_S, ranks / REPORTS_PER_S), MAX_INTERVAL_S)

    def due(self) -> bool:
        """Is it time for another progress message? One clock read per batch."""
        return self._clock() >= self._next_publish

    def report(self, progress: Progress, partial: dict[str, Any] | None = None) -> None:
        """Publishes what is committed; `partial` are the metric sums that would be lost with this process."""
        self.progress = progress
        self._next_publish = self._clock() + self._interval_s
        self._publish(progress, partial)

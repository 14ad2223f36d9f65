"""Tell a running call when it should stop, and publish its progress. Both."""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.core.channel.messages import FunctionReport, StartDealer
from raysgd.core.hang import is_in_collective
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import CollectiveCalls

REMEMBERED_STEPS = 16
MIN_INTERVAL_S, REPORTS_PER_S = 0.1, 40

Uploader = Callable[..., None]  # of a `SnapshotUpload`, and the buffers that are its content
Deliverer = Callable[[FunctionReport | StartDealer, Any], None]
Publisher = Callable[[Progress, Measured | None], None]


def report_interval_s(ranks: int) -> float:
    """How often each of `ranks` ranks reports its progress: all of them together about 40 times a
    second.

    >>> report_interval_s(2), report_interval_s(1000)
    (0.1, 25.0)
    """
    return max(MIN_INTERVAL_S, ranks / REPORTS_PER_S)


def longest_silence_s(ranks: int, running: int) -> float:
    """How long the driver may receive no report although `running` of the `ranks` ranks complete
    batches all the time. The moments at which the ranks report are spread evenly over the interval.
    In the worst case, those that are still running are neighbours.

    >>> longest_silence_s(1000, 1000), longest_silence_s(1000, 1)
    (0.025, 25.0)
    """
    return report_interval_s(ranks) * (ranks - running + 1) / ranks


def _no_transfers(*_: Any) -> Any:
    raise RuntimeError("this worker has no peers that it could give its state to, or take it from")


class Control:
    """Connects a worker's training thread with its control thread.

    Owns the stop requests of one worker, its phase (for reports of hangs) and the last published
    progress. `upload` sends a snapshot to the driver; it is None if the driver takes no snapshots.
    `deliver` sends a message that must not get lost, and returns when the driver has acknowledged
    it. `giving(name)` returns what sends this worker's state to those that `take` it, and
    `ask(name, question)` the driver's answer. `moved` says that a part of a state has moved.
    `on_interrupt` is called on the control thread. `begun_after` holds, for the newest steps, how
    many collective calls (`collectives`) had been made when each began, `joined_after` of them
    before the first one. `ensure_whole` and `is_interruption` are the backend's, and `dumps`
    pickles classes of the script, too. Never blocks the control thread, and costs the training
    thread one attribute read per batch while there is no request.

    The ranks agree on a planned stop in two phases. The control thread writes `stop_at` and then
    reads `begun`; the training thread writes `begun` and then reads `stop_at`. So at least one of
    them sees the other's write, and a proposal that comes too late is refused (`propose` returns
    False). A training thread that reaches the proposed step waits until the driver confirms it
    because all ranks have agreed (`confirm`), proposes another step, or interrupts.
    """

    def __init__(
        self,
        publish: Publisher = lambda progress, partial: None,
        *,
        interval_s: float = MIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
    ) -> None:
        self.attention = self.interrupted = False
        self.begun = 0
        self.notice = False
        self.phase = "idle"
        self.batch = 0
        self.upload: Uploader | None = None
        self.deliver: Deliverer = lambda message, body: None
        self.giving: Callable[[str], Any] = _no_transfers
        self.take: Callable[[str], Any] = _no_transfers
        self.ask: Callable[[str, Any], Any] = _no_transfers
        self.moved: Callable[[], None] = lambda: None
        self.on_interrupt: Callable[[], None] = lambda: None
        self.collectives: Callable[[], int] = lambda: -1
        self.joined_after = 0
        self.ensure_whole: Callable[..., None] = lambda *, unless_seen=False: None
        self.dumps: Callable[[Any], bytes] = pickle.dumps
        self.is_interruption: Callable[[BaseException], bool] = lambda error: False
        self.begun_after: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._publish = publish
        self._interval_s, self._next_publish = interval_s, clock()
        self._reports_ends = True
        self._stop_at: int | None = None
        self._confirmed = False
        self._clock, self._changed = clock, changed or threading.Condition()
        self.progress = Progress()

    # -- the control thread's side --------------------------------------------------------------------

    def propose(self, step: int) -> bool:
        """Ask to stop after this step. Return False if the next one has begun already."""
        with self._changed:
            self._stop_at, self._confirmed, self.attention = step, False, True
            self._changed.notify_all()
        return self.begun <= step

    def confirm(self) -> None:
        """Confirm the boundary, because all ranks agreed: one that waits there may stop."""
        with self._changed:
            self._confirmed = True
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Stop at the next batch, whatever was agreed, because the generation has ended."""
        with self._changed:
            self.interrupted = self.attention = True
            self._changed.notify_all()
        self.on_interrupt()

    def withdraw(self) -> None:
        """Cancel the planned stop: a rank that waits at the boundary continues."""
        with self._changed:
            self._stop_at, self._confirmed = None, False
            self.begun_after.clear()  # a call may begin the same steps again, after a load
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop all requests, because a new call or generation begins."""
        with self._changed:
            self._stop_at, self._confirmed, self.interrupted, self.attention = None, False, False, False
            self.begun_after.clear()

    # -- the training thread's side -------------------------------------------------------------------

    def begin(self, step: int) -> bool:
        """Note that this step begins. Return False if it must not: then leave the loop."""
        self.begun_after.append((step, self.collectives()))
        self.begun = step
        if not self.attention:
            return True
        with self._changed:
            while not self.interrupted and self._stop_at is not None and step > self._stop_at:
                self.begun = step - 1
                if self._confirmed:
                    return False
                self._changed.wait(0.5)
            if self.interrupted:
                self.begun = step - 1
                return False
            self.begun = step
        return True

    def set_rank(self, rank: int, ranks: int) -> None:
        """Share the driver's budget of reports with the other ranks, which all call this when their
        group is up: each then reports at a moment of its own."""
        self._interval_s = report_interval_s(ranks)
        self._next_publish = self._clock() + self._interval_s * rank / ranks
        self._reports_ends = rank == 0 or self._interval_s <= MIN_INTERVAL_S

    def due(self, *, last: bool = False) -> bool:
        """Whether it is time for another progress message, of which a call's `last` one is sent
        earlier by a few ranks only. This reads the clock once per batch."""
        return (last and self._reports_ends) or self._clock() >= self._next_publish

    def calls(self) -> int:
        """Return how many collective calls this rank has made since it joined its generation; -1:
        not counted."""
        return max(self.collectives() - self.joined_after, -1)

    def calls_at(self, frames: Sequence[str]) -> CollectiveCalls:
        """Return how many collective calls this rank has made, if its call ended at this stack."""
        begun = tuple((step, max(count - self.joined_after, -1)) for step, count in self.begun_after)
        return CollectiveCalls(self.calls() if is_in_collective(frames, of_all=True) else -1, begun)

    def report(self, progress: Progress, partial: Measured | None = None) -> None:
        """Publish what is committed, with a partial result that would be lost with this process."""
        self.progress = progress
        late_s = self._clock() - self._next_publish
        if late_s >= 0:
            self._next_publish += (late_s // self._interval_s + 1) * self._interval_s
        self._publish(progress, partial)

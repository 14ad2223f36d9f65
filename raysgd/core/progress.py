"""Track the progress of a rank, and tell a running call when it should stop. Both.

A batch is committed when the optimizer's step for it has been applied. Ranks of one generation can
differ by one step, because one rank may have finished its all-reduce before a peer of another rank
failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from raysgd.core.metrics import Measured

if TYPE_CHECKING:
    from raysgd.core.messages import FunctionReport, StartDealer


@dataclass(frozen=True)
class Progress:
    """What one rank has committed.

    step         batches since the start of training
    batches      batches in the running call
    expected     how many batches the running call will have, 0 if that is unknown
    finished     whether the running call has trained all its batches
    phase        what the rank is doing, for messages
    applied      optimizer steps since the start of training
    loads        how often the user has loaded a state, or changed it with a call that does not
                 train; -1 if the state is undefined, because a load has begun to change it, and has
                 not completed that
    call         the number of the running call that trains, or of the last one
    summary      of the weights after `step`, once in a run, for a comparison with the other ranks:
                 text of a `Summary`
    lacks_state  whether its weights are a new worker's own initial ones, and not the group's
    cut_short    whether a peer's failure has cut a change of the state by the user's function short
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    expected: int = 0
    finished: bool = False
    phase: str = "idle"
    applied: int = 0
    loads: int = 0
    call: int = -1
    summary: str = ""
    lacks_state: bool = False
    cut_short: bool = False

    @property
    def undefined(self) -> bool:
        return self.loads < 0

    @property
    def order(self) -> tuple[bool, int, int, int, int, bool]:
        """Return a key that sorts ranks by how much they have committed. `applied` counts within a
        batch; what was loaded later is ahead of all that was trained before."""
        whole = not (self.lacks_state or self.cut_short)
        return (whole, self.loads, self.step, self.applied, self.epoch, self.finished)

    def at(self, phase: str) -> Progress:
        return _at(self, phase)


@lru_cache(maxsize=64)
def _at(progress: Progress, phase: str) -> Progress:
    """Return the progress in another phase, made once for all ranks that are at the same place."""
    return replace(progress, phase=phase)


def most_advanced(progress: dict[str, Progress]) -> str:
    """Return the worker whose state the others take: of equal ones, the lowest rank."""
    return max(progress, key=lambda worker: progress[worker].order)


REMEMBERED_STEPS = 16
MIN_INTERVAL_S, REPORTS_PER_S = 0.1, 40

Uploader = Callable[..., None]  # of a `SnapshotUpload`, and the buffers that are its content
Deliverer = Callable[["FunctionReport | StartDealer", Any], None]
Publisher = Callable[[Progress, Measured | None], None]


def report_interval_s(ranks: int) -> float:
    """Return how often each of `ranks` ranks reports its progress: all of them together about 40
    times a second.

    >>> report_interval_s(2), report_interval_s(1000)
    (0.1, 25.0)
    """
    return max(MIN_INTERVAL_S, ranks / REPORTS_PER_S)


def longest_silence_s(ranks: int, running: int) -> float:
    """Return how long the driver may receive no report although `running` of the `ranks` ranks
    complete batches all the time. The moments at which the ranks report are spread evenly over the
    interval. In the worst case, those that are still running are neighbours.

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
    `ask(name, question)` the driver's answer. `on_interrupt` is called on the control thread.
    `outlives_driver` is whether the worker waits for another driver when its own ends.
    `begun_after` holds, for the newest steps, how many collective calls (`collectives`) had been
    made when each began; `called` returns the steps and lines of the newest calls of models, which
    make some of them. `ensure_whole` is the backend's. Never blocks the control thread, and costs
    the training thread one attribute read per batch while there is no request.

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
        self.attention = False
        self.begun = 0
        self.notice = self.outlives_driver = False
        self.phase = "idle"
        self.batch = 0
        self.upload: Uploader | None = None
        self.deliver: Deliverer = lambda message, body: None
        self.giving: Callable[[str], Any] = _no_transfers
        self.take: Callable[[str], Any] = _no_transfers
        self.ask: Callable[[str, Any], Any] = _no_transfers
        self.on_interrupt: Callable[[], None] = lambda: None
        self.collectives: Callable[[], int] = lambda: -1
        self.ensure_whole: Callable[..., None] = lambda *, unless_seen=False: None
        self.called: Callable[[], Sequence[tuple[int, str]]] = lambda: ()
        self.begun_after: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._publish = publish
        self._interval_s, self._next_publish = interval_s, clock()
        self._reports_ends = True
        self._stop_at: int | None = None
        self._confirmed = False
        self._interrupted = False
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
            self._interrupted = self.attention = True
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
            self._stop_at, self._confirmed, self._interrupted, self.attention = None, False, False, False
            self.begun_after.clear()

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    # -- the training thread's side -------------------------------------------------------------------

    def begin(self, step: int) -> bool:
        """Note that this step begins. Return False if it must not: then leave the loop."""
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

    def set_rank(self, rank: int, ranks: int) -> None:
        """Share the driver's budget of reports with the other ranks, which all call this when their
        group is up: each then reports at a moment of its own."""
        self._interval_s = report_interval_s(ranks)
        self._next_publish = self._clock() + self._interval_s * rank / ranks
        self._reports_ends = rank == 0 or self._interval_s <= MIN_INTERVAL_S

    def due(self, *, last: bool = False) -> bool:
        """Return whether it is time for another progress message, of which a call's `last` one is
        sent earlier by a few ranks only. This reads the clock once per batch."""
        return (last and self._reports_ends) or self._clock() >= self._next_publish

    def report(self, progress: Progress, partial: Measured | None = None) -> None:
        """Publish what is committed, with a partial result that would be lost with this process."""
        self.progress = progress
        late_s = self._clock() - self._next_publish
        if late_s >= 0:
            self._next_publish += (late_s // self._interval_s + 1) * self._interval_s
        self._publish(progress, partial)

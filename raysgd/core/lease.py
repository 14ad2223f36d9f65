"""Decide who is the driver of a trainer with a name, and when its workers are orphans. Pure: no
clock, no Ray. Both.

A lease says when another driver may take over, and a term whose acts count. So clocks need not
agree: a driver that was stopped for a while finds out that its term is over before it acts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

LEASE_S, RENEW_EVERY_S = 30.0, 1.0
# How long a lease holds after its last renewal if a worker has seen the end of the driver's connection since then. A driver
# whose last renewal is older asks before it acts.
WITNESSED_S = 3.0
# How long an orphan stays in its process group, because its peers need it for the step that it has completed.
LINGER_S = 2.0
GENERATIONS = 1 << 20  # in one term
PATIENCE_S = 8.0  # of a script that is started again, for the lease of one that has ended


class Grant(NamedTuple):
    """The answer to a driver that asks for the lease: its term and the record, or how long to
    wait."""

    term: int
    record: Mapping[str, bytes]
    wait_s: float = 0.0


@dataclass
class Lease:
    """Owns who drives one trainer: the newest term, until when no other driver may have it, what
    its drivers have committed (the record, in parts), and the names of all workers that they have
    started."""

    term: int = 0
    record: dict[str, bytes] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    until: float = -math.inf
    witnessed: int = 0  # the newest term whose driver has workers, which see its end
    seen_to_end: bool = False  # a worker has seen its end, and it has not renewed since then

    def take(self, now: float) -> Grant:
        """Answer a driver that wants to begin, or to take over."""
        if now < self.until:
            return Grant(0, {}, self.until - now)
        self.term += 1
        self.renew(self.term, None, now)
        return Grant(self.term, dict(self.record))

    def renew(self, term: int, parts: Mapping[str, bytes] | None, now: float) -> bool:
        """Return whether this term is the newest one, also after its lease has ended. Then it holds
        again: shortly, as long as no worker would see the end of this driver. Store the parts of
        the record that are new."""
        if term != self.term:
            return False
        self.until, self.seen_to_end = now + (LEASE_S if self.witnessed == term else WITNESSED_S), False
        self.record.update(parts or {})
        return True

    def begin_again(self, term: int, own: list[str], now: float) -> bool:
        """Forget the record, and the workers, but this driver's `own`: of those before that it
        could not end, the next one must take over none. Return False if this term is not the newest
        one."""
        if not self.renew(term, None, now):
            return False
        self.record, self.workers = {}, [each for each in self.workers if each in own]
        return True

    def enlist(self, term: int, worker: str, now: float) -> bool:
        """Note a worker that is about to connect to the driver of this term, and would not miss it
        for a whole lease. Return False if that is not the driver any more. A worker that starts
        after its driver's end does not make the lease longer."""
        if term != self.term:
            return False
        self.witnessed = term
        if not self.seen_to_end:
            self.until = max(self.until, now + LEASE_S)
        self.workers += [worker] if worker not in self.workers else []
        return True

    def witness(self, term: int, now: float) -> None:
        """Note that a worker has seen its driver's connection end. If that lives, it renews."""
        if term == self.term:
            self.until, self.seen_to_end = min(self.until, now + WITNESSED_S), True


@dataclass
class DriverWatch:
    """Owns when a worker has last heard of its driver, and since when it is an orphan. `orphan_s`
    is how long it then waits for another driver: not at all if it is 0, and the driver says nothing
    of itself, or if the connection has ended and the worker has no state of the training."""

    orphan_s: float
    heard_at: float
    since: float | None = None
    lingers: bool = False
    has_ended: bool = False  # the connection

    def heard(self, now: float) -> None:
        """Note a message of the driver."""
        self.heard_at, self.since = now, None

    def look(self, now: float, *, holds_state: bool) -> Literal["", "stop", "leave", "end"]:
        """Return what the worker must do: nothing, "stop" at the next batch boundary, "leave" the
        process group, so that ranks that wait for it stop too, or "end" itself."""
        if not self.has_ended and (not self.orphan_s or now - self.heard_at < LEASE_S):
            return ""
        if self.has_ended and not (holds_state and self.orphan_s):
            return "end"
        if self.since is None:
            self.since, self.lingers = now, True
            return "stop"
        if now - self.since >= self.orphan_s:
            return "end"
        if self.lingers and now - self.since >= LINGER_S:
            self.lingers = False
            return "leave"
        return ""

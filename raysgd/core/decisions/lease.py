"""Decide who is the driver of a trainer with a name. Pure: no clock, no Ray. Both.

A lease says when another driver may take over, and a term whose acts count. So clocks need not
agree: a driver that was stopped for a while finds out that its term is over before it acts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEASE_S, RENEW_EVERY_S = 30.0, 1.0
# How long a lease holds after its last renewal if a worker has seen the end of the driver's connection since then. A driver
# whose last renewal is older asks before it acts.
WITNESSED_S = 3.0
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
        """Whether this term is the newest one, also after its lease has ended. Then it holds again:
        shortly, as long as no worker would see the end of this driver. Store the parts of the
        record that are new."""
        if term != self.term:
            return False
        self.until, self.seen_to_end = now + (LEASE_S if self.witnessed == term else WITNESSED_S), False
        self.record.update(parts or {})
        return True

    def begin_again(self, term: int, mine: list[str], now: float) -> bool:
        """Forget the record, and the workers, but this driver's `mine`: of those before that it
        could not end, the next one must take over none. Return False if this term is not the newest
        one."""
        if not self.renew(term, None, now):
            return False
        self.record, self.workers = {}, [each for each in self.workers if each in mine]
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

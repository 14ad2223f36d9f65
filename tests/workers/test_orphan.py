"""When a worker whose driver is lost stops, leaves its process group, and ends itself."""

from raysgd.core.decisions.lease import LEASE_S
from raysgd.workers.orphan import LINGER_S, DriverContact


class Worker:
    """A worker that looks twice a second. `acts` are what it does, and when."""

    def __init__(self, orphan_s: float, *, has_ended: bool = False) -> None:
        self.now, self.acts = 0.0, list[tuple[float, str]]()
        stop, leave, end = (lambda what=each: self.acts.append((self.now, what)) for each in ("stop", "leave", "end"))
        self.driver = DriverContact(orphan_s, 0.0, stop=stop, leave=leave, end=end)
        self.driver.has_ended = has_ended

    def look(self, *, until: float, holds_state: bool = True) -> list[tuple[float, str]]:
        while self.now < until:
            self.driver.look(self.now, holds_state=holds_state)
            self.now += 0.5
        return self.acts


def test_an_orphan_stops_leaves_its_group_and_ends() -> None:
    worker = Worker(orphan_s=20.0, has_ended=True)
    assert worker.look(until=30.0) == [(0.0, "stop"), (LINGER_S, "leave"), (20.0, "end")]
    assert worker.driver.calls.get_nowait() is None, "the main thread waits for no call"


def test_a_silent_driver_is_missed_later_and_may_return() -> None:
    worker = Worker(orphan_s=20.0)
    assert worker.look(until=LEASE_S + 1.5) == [(LEASE_S, "stop")]
    worker.driver.note_message(LEASE_S + 1)
    assert worker.look(until=LEASE_S + 30) == [(LEASE_S, "stop")]


def test_a_worker_without_a_state_or_a_name_ends_with_its_driver() -> None:
    assert Worker(20.0, has_ended=True).look(until=1.0, holds_state=False) == [(0.0, "end")]
    assert Worker(0.0, has_ended=True).look(until=1.0) == [(0.0, "end")]
    assert Worker(0.0).look(until=10 * LEASE_S) == [], "and its driver need not say that it lives"

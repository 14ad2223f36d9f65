"""Who is the driver of a trainer with a name, and when its workers are orphans."""

from __future__ import annotations

import pytest

from raysgd.core.decisions.lease import LEASE_S, WITNESSED_S, Grant, Lease


def test_a_lease_has_one_term_at_a_time() -> None:
    lease = Lease()
    assert lease.take(100.0) == Grant(1, {}) and lease.enlist(1, "w0", 100.0)
    assert lease.take(110.0) == Grant(0, {}, LEASE_S - 10)
    assert lease.renew(1, None, 120.0) and lease.take(140.0).wait_s == LEASE_S - 20
    assert lease.take(120.0 + LEASE_S) == Grant(2, {})
    assert not lease.renew(1, {"": b"late"}, 150.0) and not lease.enlist(1, "w1", 0.0)
    assert lease.record == {} and lease.workers == ["w0"]


def test_a_driver_that_was_stopped_continues_if_nobody_has_taken_over() -> None:
    lease = Lease()
    lease.take(0.0)
    lease.enlist(1, "w1", 0.0)
    assert lease.renew(1, None, 10 * LEASE_S) and not lease.take(10 * LEASE_S + 1).term


def test_the_next_driver_gets_the_record_and_the_workers() -> None:
    lease = Lease()
    lease.take(0.0)
    assert lease.enlist(1, "w1", 0.0) and lease.renew(1, {"a": b"1", "b": b"1"}, 1.0)
    assert lease.renew(1, {"b": b"2"}, 2.0) and lease.renew(1, None, 3.0)
    assert lease.take(3.0 + LEASE_S) == Grant(2, {"a": b"1", "b": b"2"})
    assert lease.workers == ["w1"]


def test_a_driver_that_begins_again_leaves_nothing_of_the_training_before() -> None:
    lease = Lease()
    lease.take(0.0)
    assert lease.enlist(1, "w1", 0.0) and lease.renew(1, {"a": b"1"}, 1.0)
    assert lease.take(1.0 + LEASE_S).term == 2
    assert (
        lease.enlist(2, "w2", 40.0)
        and not lease.begin_again(1, [], 40.0)
        and (lease.record, lease.workers) == ({"a": b"1"}, ["w1", "w2"])
    )
    assert lease.begin_again(2, ["w2"], 40.0)
    assert (lease.record, lease.workers) == ({}, ["w2"]) and not lease.take(39.0 + LEASE_S).term


def test_a_driver_that_nobody_would_miss_has_a_short_lease() -> None:
    lease = Lease()
    lease.take(0.0)
    assert lease.renew(1, None, 1.0) and lease.take(1.0 + WITNESSED_S).term == 2


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_saw_its_driver_end_shortens_the_wait(lives: bool) -> None:
    lease = Lease()
    lease.take(0.0)
    assert lease.enlist(1, "w1", 0.0) and lease.renew(1, None, 4.0)
    lease.witness(1, 5.0)
    if lives:
        lease.renew(1, None, 6.0)
    assert bool(lease.take(5.0 + WITNESSED_S).term) is not lives
    lease.witness(0, 0.0)  # one of a term that is over changes nothing
    assert lease.until >= 5.0 + WITNESSED_S


def test_a_worker_that_starts_after_its_drivers_end_keeps_nobody_waiting() -> None:
    lease = Lease(until=0.0)
    assert lease.take(0.0).term == 1 and lease.enlist(1, "w1", 0.0) and lease.renew(1, None, 4.0)
    lease.witness(1, 5.0)
    assert lease.enlist(1, "w2", 6.0) and lease.until == 5.0 + WITNESSED_S
    assert lease.renew(1, None, 7.0) and lease.enlist(1, "w3", 8.0) and lease.until == 8.0 + LEASE_S

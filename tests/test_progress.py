"""Progress sorts ranks, and `Control` stops them all at one batch."""

import random
import threading
import time

import pytest

from raysgd.core.progress import Control, Progress, most_advanced
from raysgd.core.snapshot import Snapshot, SnapshotStore


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([Progress(step=3), Progress(step=4), Progress(step=4)], 1),
        ([Progress(step=4), Progress(step=4, finished=True)], 1),
        ([Progress(step=4, applied=7), Progress(step=4, applied=8)], 1),
        ([Progress(step=4, epoch=1), Progress(step=4, epoch=2)], 1),
        ([Progress(step=5), Progress(step=5)], 0),
    ],
)
def test_the_most_advanced_is_the_source(ranks: list[Progress], first: int) -> None:
    assert most_advanced({str(rank): progress for rank, progress in enumerate(ranks)}) == str(first)


def test_without_a_request_no_rank_stops() -> None:
    control = Control()
    assert all(control.begin(step) for step in range(1, 100))


def test_a_proposal_that_comes_too_late_is_refused() -> None:
    control = Control()
    assert control.begin(5)
    assert not control.propose(4)
    assert control.propose(5)


def test_an_interruption_stops_a_rank_that_waits_at_a_boundary() -> None:
    control = Control()
    control.propose(3)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(control.begin(4)))
    waiting.start()
    time.sleep(0.05)
    assert not answers
    control.interrupt()
    waiting.join(timeout=5)
    assert answers == [False] and control.begun == 3


def test_after_a_withdrawn_stop_the_rank_continues() -> None:
    control = Control()
    control.propose(3)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(control.begin(4)))
    waiting.start()
    control.withdraw()
    waiting.join(timeout=5)
    assert answers == [True] and control.begin(5)


def test_a_new_generation_drops_old_requests() -> None:
    control = Control()
    control.interrupt()
    assert not control.begin(1)
    control.clear()
    assert control.begin(1) and not control.interrupted


@pytest.mark.parametrize("seed", range(20))
def test_ranks_at_different_steps_stop_at_the_same_one(seed: int) -> None:
    """The two-phase agreement, with threads as ranks: after refusals the boundary moves on, and all stop at the same
    step."""
    chance = random.Random(seed)
    controls = [Control() for _ in range(3)]
    stopped: list[int] = [0, 0, 0]

    def train(rank: int) -> None:
        step = 0
        while controls[rank].begin(step + 1):
            step += 1
            if chance.random() < 0.05:
                time.sleep(0.0005)
        stopped[rank] = step

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    time.sleep(0.002)
    lead = 2
    while True:
        at = max(control.begun for control in controls) + lead
        if all([control.propose(at) for control in controls]):
            break
        lead *= 2
    for control in controls:
        control.confirm()
    for rank in ranks:
        rank.join(timeout=10)
    assert stopped == [at, at, at]


def test_progress_messages_are_throttled() -> None:
    published: list[Progress] = []
    control = Control(lambda progress, partial: published.append(progress), interval_s=30)
    assert control.due()
    control.report(Progress(step=1))
    assert not control.due() and published == [Progress(step=1)] and control.progress.step == 1


@pytest.mark.parametrize(("ranks", "interval_s"), [(1, 0.1), (4, 0.1), (16, 0.4), (1000, 0.5)])
def test_many_ranks_report_less_often(ranks: int, interval_s: float) -> None:
    now = [100.0]
    control = Control(clock=lambda: now[0])
    control.set_world_size(ranks)
    control.report(Progress())
    now[0] += interval_s - 0.01
    assert not control.due()
    now[0] += 0.02
    assert control.due()


def test_the_store_keeps_the_newest_snapshot() -> None:
    store = SnapshotStore()
    assert store.latest() is None
    assert store.offer(Snapshot(b"new", Progress(step=5)))
    assert not store.offer(Snapshot(b"late", Progress(step=4)))
    assert store.offer(Snapshot(b"same", Progress(step=5)))
    latest = store.latest()
    assert latest is not None and latest.data == b"same"
    store.forget()
    assert store.latest() is None

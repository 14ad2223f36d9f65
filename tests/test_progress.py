"""Progress sorts ranks, and `Control` stops them all at one batch."""

import itertools
import random
import threading
import time

import pytest

from raysgd.core.progress import Control, Progress, longest_silence_s, most_advanced, report_interval_s
from raysgd.core.snapshot import Snapshot, SnapshotStore


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([Progress(step=3), Progress(step=4), Progress(step=4)], 1),
        ([Progress(step=4), Progress(step=4, finished=True)], 1),
        ([Progress(step=4, applied=7), Progress(step=4, applied=8)], 1),
        ([Progress(step=4, epoch=1), Progress(step=4, epoch=2)], 1),
        ([Progress(step=5), Progress(step=4, loads=1)], 1),
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


@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize(("ranks", "step_s"), [(1, 0.3), (4, 0.007), (40, 0.3), (400, 0.3)])
def test_all_ranks_together_send_about_forty_reports_a_second(ranks: int, step_s: float) -> None:
    now, reports = [100.0], list[float]()
    controls = [Control(lambda progress, partial: reports.append(now[0]), clock=lambda: now[0]) for _ in range(ranks)]
    for rank, control in enumerate(controls):
        control.set_rank(rank, ranks)
    seconds = max(3 * report_interval_s(ranks), 20 * step_s)
    for step in range(int(seconds / step_s)):
        now[0] += step_s
        for control in controls:
            if control.due(last=step % 50 == 49 and ranks > 4):  # the ends of calls count, too
                control.report(Progress(step=step))
    assert len(reports) <= 42 * seconds + ranks, "40 reports a second, and those of rank 0 at the ends of calls"
    gaps = [after - before for before, after in itertools.pairwise(reports)]
    assert max(gaps) <= step_s + longest_silence_s(ranks, ranks) + 1e-6, "the ranks take turns"
    assert len(reports) >= seconds * min(40, ranks / max(step_s, 0.1)) * 0.7, "every rank reports"


@pytest.mark.parametrize(("rank", "ranks", "reports"), [(0, 1000, True), (1, 1000, False), (3, 4, True), (4, 5, False)])
def test_which_ranks_report_the_end_of_a_call(rank: int, ranks: int, reports: bool) -> None:
    now = [100.0]
    control = Control(clock=lambda: now[0])
    control.set_rank(rank, ranks)
    now[0] += report_interval_s(ranks)
    control.report(Progress())
    assert not control.due() and control.due(last=True) is reports


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


def test_a_snapshot_from_before_a_load_does_not_undo_it() -> None:
    store = SnapshotStore()
    assert store.offer(Snapshot(b"before", Progress(step=8)))
    store.require(1)
    assert store.latest() is None
    assert not store.offer(Snapshot(b"it was on its way", Progress(step=9)))
    assert store.offer(Snapshot(b"loaded", Progress(step=5, loads=1)))
    store.require(1)
    assert content(store) == b"loaded"


def test_a_load_that_has_failed_leaves_no_snapshot() -> None:
    store = SnapshotStore()
    store.offer(kept := Snapshot(b"before", Progress(step=8)))
    store.offer(Snapshot(b"rescued while it was loaded", Progress(step=9)))
    store.take_back(kept, 1)
    assert content(store) == b"rescued while it was loaded"
    store.offer(Snapshot(b"refused by another rank", Progress(step=5, loads=1)))
    store.take_back(kept, 1)
    assert content(store) == b"before"


def content(store: SnapshotStore) -> bytes:
    latest = store.latest()
    assert latest is not None
    return bytes(latest.content())

"""Progress sorts ranks, and `Control` stops them all at one batch."""

import itertools
import threading
import time

import pytest

from raysgd.core.control import Control, longest_silence_s, report_interval_s
from raysgd.core.measures.progress import Progress
from raysgd.core.snapshot import Snapshot, newest_state


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([Progress(step=3), Progress(step=4), Progress(step=4)], 1),
        ([Progress(step=4), Progress(step=4, finished=True)], 1),
        ([Progress(step=4, applied=7), Progress(step=4, applied=8)], 1),
        ([Progress(step=4, epoch=1), Progress(step=4, epoch=2)], 1),
        ([Progress(step=5), Progress(step=4, loads=1)], 1),
        ([Progress(step=5), Progress(step=5)], 0),
        ([Progress(lacks_state=True), Progress()], 1),
        ([Progress(loads=1, lacks_state=True), Progress()], 1),
    ],
)
def test_the_most_advanced_is_the_source(ranks: list[Progress], first: int) -> None:
    assert newest_state({str(rank): progress for rank, progress in enumerate(ranks)}) == str(first)


@pytest.mark.parametrize(
    ("worker", "snapshot", "newest"),
    [
        (Progress(step=5), Progress(step=4), "0"),
        (Progress(step=5), Progress(step=5), None),
        (Progress(step=5), Progress(step=4, loads=1), None),
        (Progress(lacks_state=True), Progress(), None),
    ],
)
def test_a_snapshot_is_the_source_if_no_worker_has_more(
    worker: Progress, snapshot: Progress, newest: str | None
) -> None:
    assert newest_state({"0": worker}, Snapshot(progress=snapshot)) == newest
    assert newest_state({}, Snapshot(progress=snapshot)) is None


def test_an_interruption_stops_a_rank_that_waits_at_a_boundary() -> None:
    control = Control()
    control.propose(3)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(control.begin(4)))
    waiting.start()
    time.sleep(0.05)
    assert not answers
    control.interrupt()
    waiting.join(timeout=60)
    assert answers == [False] and control.begun == 3


def test_after_a_withdrawn_stop_the_rank_continues() -> None:
    control = Control()
    control.propose(3)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(control.begin(4)))
    waiting.start()
    control.withdraw()
    waiting.join(timeout=60)
    assert answers == [True] and control.begin(5)


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

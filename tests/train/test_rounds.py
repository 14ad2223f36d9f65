"""Reports of several ranks become rounds; who disagrees is named; what was taken counts also after a loss."""

import pickle
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.messages import FunctionReport
from raysgd.errors import CheckpointError
from raysgd.train import checkpoint_manager
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.errors import ReportMismatchError
from raysgd.train.run import FunctionRun, Report, Rounds, checkpoint_of


def test_a_round_is_complete_when_every_rank_has_reported() -> None:
    rounds = Rounds(2)
    assert rounds.add(Report(1, metrics={"a": 1})) is None
    complete = rounds.add(Report(0, metrics={"a": 0}))
    assert complete is not None
    assert [report.metrics["a"] for report in complete] == [0, 1], "in rank order"
    assert rounds.take_incomplete() == []


def test_a_fast_rank_may_run_ahead() -> None:
    rounds = Rounds(2)
    assert [rounds.add(Report(0, metrics={"step": step})) for step in range(3)] == [None, None, None]
    complete = [rounds.add(Report(1, metrics={"step": step})) for step in range(3)]
    assert [[r.metrics["step"] for r in round_ or ()] for round_ in complete] == [[0, 0], [1, 1], [2, 2]]


def test_one_rank_is_a_round() -> None:
    assert Rounds(1).add(Report(0)) == (Report(0),)


def test_different_kinds_are_an_error_that_names_the_ranks() -> None:
    rounds = Rounds(3)
    rounds.add(Report(0, "checkpoint", checkpoint=b""))
    with pytest.raises(
        ReportMismatchError, match=r"rank\(s\) 2 called train.report.*rank\(s\) 0 called train.save_checkpoint"
    ):
        rounds.add(Report(2, "report"))


def test_kinds_are_compared_round_by_round() -> None:
    rounds = Rounds(2)
    rounds.add(Report(0, "report"))
    rounds.add(Report(0, "checkpoint"))
    assert rounds.add(Report(1, "report")) is not None
    assert rounds.add(Report(1, "checkpoint")) is not None


def test_more_calls_than_the_others_are_an_error() -> None:
    rounds = Rounds(3)
    rounds.add(Report(0))
    rounds.add(Report(1))
    with pytest.raises(
        ReportMismatchError, match=r"rank\(s\) 0, 1 called train.report\(\) more often than rank\(s\) 2"
    ):
        rounds.check_counts()


def test_leftovers_are_what_was_not_complete_in_order() -> None:
    rounds = Rounds(2)
    for step in range(2):
        rounds.add(Report(1, "checkpoint", checkpoint=bytes([step])))
    left = rounds.take_incomplete()
    assert [checkpoint_of(round_) for round_ in left] == [b"\0", b"\1"]
    assert rounds.take_incomplete() == []


def test_the_lowest_rank_with_a_checkpoint_counts() -> None:
    assert checkpoint_of((Report(0, checkpoint=b"a"), Report(1, checkpoint=b"b"))) == b"a"
    assert checkpoint_of((Report(0), Report(1, checkpoint=b"b"))) == b"b"
    assert checkpoint_of((Report(0), Report(1))) is None


class Driver:
    """A run of some ranks, and what goes wrong in it."""

    def __init__(self, tmp_path: Path, *, manager: CheckpointManager | None = None, ranks: int = 2) -> None:
        self.failed: list[BaseException] = []
        self.run = FunctionRun(1, manager or CheckpointManager(tmp_path), fail=self.failed.append, decode=dict)
        self.attempt = self.run.begin_attempt(ranks)

    def say(self, rank: int, *, attempt: int | None = None, checkpoint: Any = None, **metrics: Any) -> None:
        head = pickle.dumps(metrics)
        message = FunctionReport(
            kind="report" if checkpoint is None else "checkpoint",
            run=1,
            attempt=attempt or self.attempt.number,
            rank=rank,
            metrics_size=len(head),
            has_checkpoint=checkpoint is not None,
        )
        self.run.receive(message, head + (b"" if checkpoint is None else pickle.dumps(checkpoint)))

    def latest(self) -> Any:
        found = self.run.manager.latest
        return None if found is None else found.to_dict()["epoch"]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.run.close()


def test_after_a_loss_the_first_checkpoint_that_only_some_made_counts(driver: Driver) -> None:
    driver.say(0, checkpoint={"epoch": 0})
    driver.say(1, checkpoint={"epoch": 0})
    for epoch in (1, 2, 3):
        driver.say(1, checkpoint={"epoch": epoch})
    assert driver.latest() == 0
    second = driver.run.begin_attempt(1)
    assert (driver.latest(), second.number) == (1, 2)


def test_after_a_loss_reports_of_some_are_shown_as_they_are(driver: Driver) -> None:
    driver.say(0, step=0)
    driver.say(0, step=1)
    driver.say(1, step=0)
    driver.attempt = driver.run.begin_attempt(1)
    assert driver.attempt.reports == 2
    driver.say(0, step=2)
    driver.say(0, step=9, attempt=1)
    driver.run.close()
    rounds = [driver.run.next_round(0) for _ in range(4)]
    rows = [result and result.rows for result in rounds[:3]]
    assert rows == [[{"step": 0}, {"step": 0}], [{"step": 1}], [{"step": 2}]], "a late one is not counted"
    assert rounds[3] is None
    assert driver.failed == []


def test_what_goes_wrong_with_a_report_ends_the_run(driver: Driver) -> None:
    driver.say(0, step=0)
    driver.say(1, checkpoint={"epoch": 0})
    (error,) = driver.failed
    assert isinstance(error, ReportMismatchError)


class SlowStore(CheckpointManager):
    """Stores nothing until it is let, or fails."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.let, self.fails = threading.Event(), False

    def store(self, number: int, payload: bytes, metrics: dict[str, Any]) -> None:
        assert self.let.wait(60)
        if self.fails:
            raise OSError("no space left on device")
        super().store(number, payload, metrics)


def slow(tmp_path: Path) -> tuple[Driver, SlowStore]:
    manager = SlowStore(tmp_path)
    return Driver(tmp_path, manager=manager, ranks=1), manager


def test_a_slow_store_holds_up_no_recovery_and_a_round_is_shown_when_its_checkpoint_is_stored(tmp_path: Path) -> None:
    driver, manager = slow(tmp_path)
    driver.say(0, checkpoint={"epoch": 0})
    driver.say(0, step=0)
    assert driver.latest() == 0, "it is what a function that runs again is given"
    assert driver.run.begin_attempt(1).reports == 1
    with pytest.raises(queue.Empty):
        driver.run.next_round(0.01)
    assert list(tmp_path.iterdir()) == []
    manager.let.set()
    result = driver.run.next_round(60)
    assert result is not None and result.rows == [{"step": 0}]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]
    driver.run.close()
    assert driver.run.error is None


def test_what_cannot_be_stored_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    driver, manager = slow(tmp_path)
    manager.fails = True
    for epoch in range(2):  # as many as there is room for
        driver.say(0, checkpoint={"epoch": epoch})
    manager.let.set()
    driver.run.close()
    assert isinstance(driver.run.error, OSError)
    assert driver.failed == [driver.run.error], "told once, while the function runs"


def test_checkpoints_that_wait_to_be_stored_are_few(tmp_path: Path) -> None:
    driver, manager = slow(tmp_path)
    done: list[int] = []

    def bring() -> None:
        for epoch in range(4):
            driver.say(0, checkpoint={"epoch": epoch})
            done.append(epoch)

    thread = threading.Thread(target=bring)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and len(done) <= 2
    manager.let.set()
    thread.join(60)
    driver.run.close()
    assert done == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_store_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manager, "WRITE_LIMIT_S", 0.3)
    driver, manager = slow(tmp_path)
    for epoch in range(3):  # one more than there is room for
        driver.say(0, checkpoint={"epoch": epoch})
    (error,) = driver.failed
    assert isinstance(error, CheckpointError) and "could not be stored within 0.3 s" in str(error)
    driver.run.close()
    assert isinstance(driver.run.error, CheckpointError)
    assert driver.run.next_round(0) is None
    assert list(tmp_path.iterdir()) == []
    manager.let.set()

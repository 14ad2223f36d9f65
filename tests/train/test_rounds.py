"""The driver's side of a run: rounds that are incomplete when workers fail, and storage that is slow, fails or hangs.

tests/simulation has the rounds of complete and repeated attempts."""

import pickle
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks.base import TRACES
from raysgd.core.messages import FunctionReport
from raysgd.errors import CheckpointError
from raysgd.train import Backend, ReportMismatchError, checkpoint_manager
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.job import FunctionJob
from raysgd.train.rounds import UNSTORED_ROUNDS, FunctionRun


class Driver:
    """The driver's side of a run, and the errors in it."""

    def __init__(self, tmp_path: Path, *, manager: CheckpointManager | None = None, ranks: int = 2) -> None:
        self.failed: list[BaseException] = []
        self.went_on: list[tuple[int, int]] = []  # rank and step
        self.run = FunctionRun(
            1, manager or CheckpointManager(tmp_path), FunctionJob(function=dict), Backend(), fail=self.failed.append
        )
        self.attempt = self.run.begin_attempt(ranks)

    def report(self, rank: int, *, attempt: int | None = None, checkpoint: Any = None, **metrics: Any) -> None:
        head = pickle.dumps(metrics)
        message = FunctionReport(
            kind="report" if checkpoint is None else "checkpoint",
            run=1,
            attempt=attempt or self.attempt.number,
            rank=rank,
            metrics_size=len(head),
            has_checkpoint=checkpoint is not None,
        )
        body = head + (b"" if checkpoint is None else pickle.dumps(checkpoint))
        self.run.receive(message, body, lambda: self.went_on.append((rank, metrics.get("step", -1))))

    def latest(self) -> Any:
        found = self.run.manager.latest
        return None if found is None else found.to_dict()["epoch"]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.run.close()


def fetched(driver: Driver) -> list[tuple[Any, bool]]:
    """Return the rounds of a run that has ended, and whether each is complete."""
    rounds = []
    while (result := driver.run.next_round(0)) is not None:
        rounds.append((result.rows, result.complete))
    return rounds


def test_a_row_of_rank_0_that_nobody_will_repeat_is_recorded(driver: Driver) -> None:
    driver.report(0, step=0)
    driver.report(0, checkpoint={"epoch": 0})
    driver.report(0, step=1)
    driver.attempt = driver.run.begin_attempt(1)
    assert (driver.attempt.reports, driver.latest()) == (1, 0)
    driver.run.close()
    assert fetched(driver) == [([{"step": 0}], False)]


def test_profiler_traces_are_in_no_row(driver: Driver) -> None:
    for rank in range(2):
        driver.report(rank, step=0, **{TRACES: {"trace.json": bytes([rank])}})
    result = driver.run.next_round(60)
    assert result is not None and result.rows == [{"step": 0}, {"step": 0}]
    assert result.traces == [{"trace.json": b"\0"}, {"trace.json": b"\1"}]


def test_after_a_mismatch_nothing_is_a_round(driver: Driver) -> None:
    driver.report(0, step=0)
    driver.report(1, checkpoint={"epoch": 0})
    driver.report(0, step=1)
    driver.report(1, step=0)
    assert isinstance(driver.failed[0], ReportMismatchError)
    driver.run.close()
    assert fetched(driver) == []
    assert (len(driver.failed), driver.latest()) == (1, None)


def test_a_rank_waits_neither_for_the_user_nor_for_other_ranks(driver: Driver) -> None:
    for step in range(9):
        driver.report(0, step=step)
    assert driver.went_on == [(0, step) for step in range(9)] and not driver.run.keeps_ranks_waiting()


class SlowStorage(CheckpointManager):
    """Stores nothing until it is allowed to, or fails."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.allowed, self.fails = threading.Event(), False

    def store(self, number: int, payload: bytes, metrics: dict[str, Any]) -> None:
        assert self.allowed.wait(60)
        if self.fails:
            raise OSError("no space left on device")
        super().store(number, payload, metrics)


def with_slow_storage(tmp_path: Path) -> tuple[Driver, SlowStorage]:
    manager = SlowStorage(tmp_path)
    return Driver(tmp_path, manager=manager, ranks=1), manager


def test_slow_storage_delays_no_recovery_and_a_round_is_visible_after_its_checkpoint_is_stored(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    driver.report(0, checkpoint={"epoch": 0})
    driver.report(0, step=0)
    assert driver.latest() == 0, "a function that runs again would get this checkpoint"
    assert driver.run.begin_attempt(1).reports == 1
    with pytest.raises(queue.Empty):
        driver.run.next_round(0.01)
    assert list(tmp_path.iterdir()) == []
    manager.allowed.set()
    result = driver.run.next_round(60)
    assert result is not None and result.rows == [{"step": 0}]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]
    driver.run.close()
    assert driver.run.error is None


def test_who_waits_when_the_workers_fail_waits_no_longer(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    for epoch in range(UNSTORED_ROUNDS + 1):
        driver.report(0, checkpoint={"epoch": epoch}, step=epoch)
    assert len(driver.went_on) == UNSTORED_ROUNDS
    driver.run.begin_attempt(1)
    assert len(driver.went_on) == UNSTORED_ROUNDS + 1
    driver.report(0, step=9)  # late, of the first attempt
    assert driver.went_on[-1] == (0, 9)
    manager.allowed.set()
    driver.run.close()


def test_an_error_of_the_storage_ends_the_run(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    manager.fails = True
    for epoch in range(2):
        driver.report(0, checkpoint={"epoch": epoch})
    manager.allowed.set()
    driver.run.close()
    assert isinstance(driver.run.error, OSError)
    assert driver.failed == [driver.run.error], "reported once, while the function is running"


def test_the_ranks_wait_for_slow_storage_and_the_driver_does_not(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    for epoch in range(6):
        assert not driver.run.keeps_ranks_waiting() or epoch > UNSTORED_ROUNDS
        driver.report(0, checkpoint={"epoch": epoch}, step=epoch)
    assert driver.went_on == [(0, epoch) for epoch in range(UNSTORED_ROUNDS)] and driver.run.keeps_ranks_waiting()
    assert driver.latest() == 5, "all were received"
    manager.allowed.set()
    driver.run.close()
    assert len(driver.went_on) == 6
    assert len(list(tmp_path.iterdir())) == 6


def test_a_run_does_not_wait_forever_for_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manager, "WRITE_LIMIT_S", 0.1)
    driver, manager = with_slow_storage(tmp_path)
    driver.report(0, checkpoint={"epoch": 0})
    driver.run.close()
    (error,) = driver.failed
    assert isinstance(error, CheckpointError) and "could not be stored within 0.1 s" in str(error)
    assert driver.run.error is error
    assert driver.run.next_round(0) is None
    assert list(tmp_path.iterdir()) == []
    manager.allowed.set()

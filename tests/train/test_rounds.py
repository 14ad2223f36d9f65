"""The driver's side of a run: ranks that wait for each other, and storage that is slow, fails or hangs.

tests/simulation has the rounds of complete and repeated attempts."""

import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.callbacks.base import TRACES
from raysgd.core.channel.messages import FunctionReport
from raysgd.errors import CheckpointError
from raysgd.train import Backend, ReportMismatchError
from raysgd.train.run import checkpoint_manager, rounds
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.job import FunctionJob
from raysgd.train.run.rounds import FunctionRun
from tests.faults import until
from tests.replicas import FunctionRank


class Driver:
    """The driver's side of a run, and the errors in it."""

    def __init__(self, tmp_path: Path, *, manager: CheckpointManager | None = None, ranks: int = 2) -> None:
        self.failed: list[BaseException] = []
        self.went_on: list[tuple[int, int]] = []  # rank and step
        self.recorded: list[tuple[dict[str, Any], int, int]] = []  # metrics, newest checkpoint, calls returned so far
        job = FunctionJob(function=dict, record=lambda *row: self.recorded.append((*row, len(self.went_on))))
        self.run = FunctionRun(1, manager or CheckpointManager(tmp_path), job, Backend(), fail=self.failed.append)
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


class NotYet(Exception):
    """Ends a look for the next round, because there is none yet."""


def give_up() -> None:
    raise NotYet


def rows_of(driver: Driver) -> list[Any]:
    """Return the rows of the rounds of a run that has ended."""
    found = []
    while (result := driver.run.next_round()) is not None:
        found.append(result.rows)
    return found


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.run.close()


def test_a_round_that_is_not_complete_is_reported_again(driver: Driver) -> None:
    driver.report(0, step=0)
    driver.attempt = driver.run.begin_attempt(1)
    assert (driver.attempt.reports, driver.went_on) == (0, [(0, 0)])
    driver.report(0, step=0)
    driver.run.close()
    assert rows_of(driver) == [[{"step": 0}]]


def test_reports_before_elastic_are_none_of_those_to_repeat(tmp_path: Path) -> None:
    def function(last: str) -> None:
        train.report(part="begin")
        state = train.elastic({"parts": 0})
        for part in "abc":
            train.report(part=part)
            if part == last:
                return
        state.commit()

    driver, rank = Driver(tmp_path, ranks=1), FunctionRank()
    for last in ("a", "a", "b", "c"):  # each ends before the commit
        rank.messages.clear()
        rank.run(function, last, **vars(driver.attempt))
        for message, metrics, _ in rank.messages:
            body = pickle.dumps(metrics)
            driver.run.receive(replace(message, metrics_size=len(body)), body)
        driver.attempt = driver.run.begin_attempt(1)
    driver.run.close()
    assert [rows[0]["part"] for rows in rows_of(driver)] == ["begin", "a", "begin", "begin", "b", "begin", "c"]


def test_profiler_traces_are_in_no_row(driver: Driver) -> None:
    for rank in range(2):
        driver.report(rank, step=0, **{TRACES: {"trace.json": bytes([rank])}})
    result = driver.run.next_round()
    assert result is not None and result.rows == [{"step": 0}, {"step": 0}]
    assert result.traces == [{"trace.json": b"\0"}, {"trace.json": b"\1"}]


def test_after_a_mismatch_nothing_is_a_round(driver: Driver) -> None:
    driver.report(0, step=0)
    driver.report(1, checkpoint={"epoch": 0})
    driver.report(0, step=1)
    driver.report(1, step=0)
    assert isinstance(driver.failed[0], ReportMismatchError)
    driver.run.close()
    assert rows_of(driver) == []
    assert (len(driver.failed), driver.latest()) == (1, None)


def test_a_rank_waits_until_all_have_reported(driver: Driver) -> None:
    driver.report(0, step=0)
    assert driver.went_on == [] and not driver.run.waits_for_storage()
    driver.report(1, step=0)
    assert driver.run.next_round() is not None
    for _ in until(lambda: len(driver.went_on) == 2):
        time.sleep(0.01)
    assert driver.went_on == [(0, 0), (1, 0)]


RETURNED = (
    "rank 0 called train.report(), and the function has returned on rank 1 without it. The call returns when every rank has made "
    "it. Call it on every rank, and not under `if world_rank() == 0`"
)


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_rank_does_not_wait_for_one_that_has_returned(driver: Driver, returns_first: bool) -> None:
    for returns in (returns_first, not returns_first):
        driver.run.note_return(1) if returns else driver.report(0, step=0)
    (error,) = driver.failed
    assert isinstance(error, ReportMismatchError) and str(error) == RETURNED
    assert driver.went_on == [], "it is interrupted"
    driver.run.note_return(0)
    assert driver.failed == [error]


def test_who_waits_long_for_whom_is_logged_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "LONG_S", -1.0)
    driver.report(1, checkpoint={"epoch": 0})
    for _ in range(2):
        driver.run.waits_for_storage()
    (line,) = caplog.messages
    assert line.startswith("rank 1 called train.save_checkpoint(), and rank 0 did not within")
    assert line.endswith("Call it on every rank, and not under `if world_rank() == 0`")


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
    with pytest.raises(NotYet):
        driver.run.next_round(give_up)
    assert list(tmp_path.iterdir()) == []
    manager.allowed.set()
    result = driver.run.next_round()
    assert result is not None and result.rows == [{"step": 0}]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]
    driver.run.close()
    assert driver.run.error is None


def test_a_round_is_recorded_after_its_checkpoint_and_before_its_ranks_continue(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    driver.report(0, step=0)
    driver.report(0, checkpoint={"epoch": 0})
    driver.report(0, step=1)
    for _ in until(lambda: driver.went_on == [(0, 0)]):
        time.sleep(0.01)
    assert driver.recorded == [({"step": 0}, 0, 0)]
    manager.allowed.set()
    driver.run.close()
    assert driver.recorded[1:] == [({"step": 1}, 1, 2)], "although the script has not fetched it"


def test_an_error_of_the_record_ends_the_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path, ranks=1)
    driver.recorded = None  # type: ignore[assignment]
    driver.report(0, step=0)
    driver.run.close()
    assert isinstance(driver.run.error, AttributeError) and driver.failed == [driver.run.error]
    with pytest.raises(AttributeError):
        driver.run.next_round()  # instead of the round


def test_who_waits_when_the_workers_fail_waits_no_longer(tmp_path: Path) -> None:
    driver, manager = with_slow_storage(tmp_path)
    driver.report(0, checkpoint={"epoch": 0}, step=0)
    assert driver.went_on == []
    driver.run.begin_attempt(1)
    assert driver.went_on == [(0, 0)]
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
    assert not driver.run.waits_for_storage()
    driver.report(0, checkpoint={"epoch": 0}, step=0)
    assert driver.went_on == [] and driver.run.waits_for_storage()
    assert driver.latest() == 0, "it was received"
    manager.allowed.set()
    driver.run.close()
    assert driver.went_on == [(0, 0)] and not driver.run.waits_for_storage()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]


def test_a_run_does_not_wait_forever_for_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manager, "WRITE_LIMIT_S", 0.1)
    driver, manager = with_slow_storage(tmp_path)
    driver.report(0, checkpoint={"epoch": 0})
    driver.run.close()
    (error,) = driver.failed
    assert isinstance(error, CheckpointError) and "could not be stored within 0.1 s" in str(error)
    assert driver.run.error is error
    with pytest.raises(CheckpointError, match="could not be stored"):
        driver.run.next_round()
    assert list(tmp_path.iterdir()) == []
    manager.allowed.set()

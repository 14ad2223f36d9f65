"""The contract of a training function: a function goes in, reports and results come out.

Each case uses what users use, `raysgd.train` and the trainer's methods, and runs on a trainer with one worker and on one
with two. Those that need neither reports nor checkpoints also run as a direct call, without a driver.
"""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from ray.actor import exit_actor

from raysgd import ElasticConfig, train
from raysgd.callbacks import Callback, CallResult
from raysgd.train import (
    Checkpoint,
    CheckpointConfig,
    ReportMismatchError,
    TrainBackendError,
    Trainer,
    TrainingCallback,
    TrainingIterator,
    TrainingWorkerError,
)
from tests.faults import once
from tests.training.test_metric_values import LARGE

DEADLINE_S = 60.0


# -- where a function runs ----------------------------------------------------------------------------


class Place(Protocol):
    ranks: int

    def run(self, function: Callable[..., Any], config: dict[str, Any] | None = None) -> list[Any]:
        """Run the function to its end, and return what each rank returned."""


class Direct:
    """The function is called in this process, as in a test of the function."""

    ranks = 1

    def run(self, function: Callable[..., Any], config: dict[str, Any] | None = None) -> list[Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="train.* was called outside a training function")
            return [function() if config is None else function(config)]


class OnWorkers:
    """The function runs on the workers of one trainer, which all tests share."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self.trainer = Trainer(
            "none",
            num_workers=ranks,
            logdir=folder,
            max_retries=1,
            elastic=ElasticConfig(hang_timeout_s=60),
        )
        self.trainer.start()

    def run(self, function: Callable[..., Any], config: dict[str, Any] | None = None, **more: Any) -> list[Any]:
        return self.trainer.run(function, config, **more)

    def iterate(self, function: Callable[..., Any], config: dict[str, Any] | None = None) -> TrainingIterator:
        return self.trainer.run_iterator(function, config)

    def stored(self) -> list[str]:
        """Return the names of the checkpoints that the newest run has kept in storage."""
        folder = self.trainer.latest_checkpoint_dir
        assert isinstance(folder, Path)
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def one(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnWorkers]:
    made = OnWorkers(1, tmp_path_factory.mktemp("one"))
    yield made
    made.trainer.shutdown()


@pytest.fixture(scope="module")
def several(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnWorkers]:
    made = OnWorkers(2, tmp_path_factory.mktemp("several"))
    yield made
    made.trainer.shutdown()


def until_complete(config: dict[str, int]) -> None:
    looks = train.elastic({"number": 0})
    while train.world_size() < config["ranks"]:
        time.sleep(0.05)
        looks.commit()  # here new workers join


@pytest.fixture
def two(several: OnWorkers) -> OnWorkers:
    """Two workers, also after a test in which one has failed."""
    if len(several.trainer.worker_group) < several.ranks:
        several.run(until_complete, {"ranks": several.ranks})
    return several


@pytest.fixture(params=["one", "two"])
def workers(request: pytest.FixtureRequest) -> OnWorkers:
    found: OnWorkers = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["direct", "one", "two"])
def place(request: pytest.FixtureRequest) -> Place:
    return Direct() if request.param == "direct" else request.getfixturevalue(request.param)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"no rank has made {file}"
        time.sleep(0.01)


class Listener(TrainingCallback):
    """Keeps the rounds of a run, with one value of each row, and whether the run failed."""

    def __init__(self, name: str = "step") -> None:
        self.name, self.rounds, self.failed = name, [], None  # type: tuple[str, list[Any], bool | None]

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self.rounds.append([row[self.name] for row in results])

    def finish_training(self, error: bool = False) -> None:
        self.failed = error


# -- ranks and results --------------------------------------------------------------------------------


def test_each_rank_knows_its_place(place: Place) -> None:
    def function() -> list[int]:
        context = train.get_context()
        shown = [context.get_world_rank(), context.get_local_rank(), context.get_world_size()]
        assert shown == [train.world_rank(), train.local_rank(), train.world_size()]
        return [*shown, context.get_local_world_size(), context.get_node_rank()]

    assert place.run(function) == [[rank, rank, place.ranks, place.ranks, 0] for rank in range(place.ranks)]


def test_what_each_rank_returns_comes_back_in_rank_order(place: Place) -> None:
    assert place.run(lambda: {"rank": train.world_rank()}) == [{"rank": rank} for rank in range(place.ranks)]
    assert place.run(lambda config: config["a"], {"a": 3}) == [3] * place.ranks


def test_an_error_keeps_its_type_and_ends_the_run(place: Place) -> None:
    def function() -> None:
        raise NotImplementedError("mine")

    with pytest.raises(NotImplementedError, match="mine"):
        place.run(function)
    assert place.run(lambda: 1) == [1] * place.ranks, "the workers stay usable"


def test_a_report_that_cannot_be_sent_is_an_error_of_the_function(place: Place) -> None:
    with pytest.raises(TypeError, match=r"train\.report\(\) cannot send lock to the driver"):
        place.run(lambda: train.report(loss=1, lock=threading.Lock()))
    assert place.run(lambda: 1) == [1] * place.ranks


def test_a_result_that_cannot_be_sent_is_an_error_of_the_function(workers: OnWorkers) -> None:
    before = len(workers.trainer.recoveries)
    with pytest.raises(TypeError, match="pickle"):
        workers.run(lambda: threading.Lock())
    assert len(workers.trainer.recoveries) == before, "no worker has failed"


def test_the_error_of_one_rank_stops_the_others(two: OnWorkers, tmp_path: Path) -> None:
    def function() -> None:
        train.report(step=0)
        (tmp_path / str(train.world_rank())).touch()
        if train.world_rank() == 1:
            wait_for(tmp_path / "0")  # the driver has the reports of both ranks
            raise NotImplementedError("mine")
        time.sleep(DEADLINE_S)

    listener, began = Listener(), time.monotonic()
    with pytest.raises(NotImplementedError, match="mine") as raised:
        two.run(function, callbacks=[listener])
    assert time.monotonic() - began < DEADLINE_S / 2
    assert "on rank 1" in str(raised.value.__cause__)
    assert (listener.rounds, listener.failed) == ([[0, 0]], True), "what was reported before is not lost"
    assert two.run(lambda: 1) == [1, 1]


# -- reports ------------------------------------------------------------------------------------------


def test_callbacks_get_each_round_once_with_a_row_of_each_rank(workers: OnWorkers) -> None:
    def function() -> None:
        for step in range(5):
            train.report({"step": (step, train.world_rank())})

    listener = Listener()
    workers.run(function, callbacks=[listener])
    expected = [[(step, rank) for rank in range(workers.ranks)] for step in range(5)]
    assert (listener.rounds, listener.failed) == (expected, False)


def test_reports_are_counted_and_timed(workers: OnWorkers) -> None:
    def function() -> None:
        train.report(step=0)
        time.sleep(0.05)
        train.report(step=1, _timestamp=7)

    first, second = workers.iterate(function)
    assert [row["_training_iteration"] for row in first + second] == [1] * workers.ranks + [2] * workers.ranks
    assert all(row["_time_this_iter_s"] >= 0.05 for row in second)
    assert all(abs(row["_timestamp"] - time.time()) < DEADLINE_S for row in first)
    assert [row["_timestamp"] for row in second] == [7] * workers.ranks, "the user's own value has priority"


def test_reports_and_checkpoints_of_any_size_arrive(two: OnWorkers) -> None:
    for make in LARGE.values():
        (rows,) = two.iterate(lambda given: (train.report(given), train.save_checkpoint(**given)), make())
        assert [{name: row[name] for name in make()} for row in rows] == [make()] * two.ranks
        assert make().items() <= (two.trainer.latest_checkpoint or {}).items()


def test_a_report_that_cannot_be_sent_is_not_counted(workers: OnWorkers) -> None:
    def function() -> None:
        for step in range(3):
            with contextlib.suppress(TypeError):
                train.report(step=threading.Lock())
            train.report(step=step)

    listener = Listener("_training_iteration")
    workers.run(function, callbacks=[listener])
    assert listener.rounds == [[number] * workers.ranks for number in range(1, 4)]


def test_a_report_returns_when_all_ranks_have_reported(two: OnWorkers, tmp_path: Path) -> None:
    def function() -> list[bool]:
        rank, others = train.world_rank(), []
        for step in range(3):
            if rank == 1:
                time.sleep(0.1)
            (tmp_path / f"{rank}-{step}").touch()
            train.report(step=step, rank=rank)
            others.append((tmp_path / f"{1 - rank}-{step}").exists())
        return others

    rounds = two.iterate(function)
    assert [[(row["step"], row["rank"]) for row in rows] for rows in rounds] == [
        [(step, 0), (step, 1)] for step in range(3)
    ]
    assert rounds.get_final_results() == [[True] * 3] * 2, "a report returns when the other rank has called it"


@pytest.mark.parametrize("call", ["report", "save_checkpoint"])
def test_a_rank_that_reports_alone_is_named(two: OnWorkers, call: str) -> None:
    def function() -> None:
        train.report(step=0)
        if train.world_rank() == 0:
            getattr(train, call)(step=1)
            time.sleep(DEADLINE_S)

    listener, began = Listener(), time.monotonic()
    with pytest.raises(ReportMismatchError) as raised:
        two.run(function, callbacks=[listener])
    assert str(raised.value) == (
        f"rank 0 called train.{call}(), and the function has returned on rank 1 without it. The call returns when "
        "every rank has made it. Call it on every rank, and not under `if world_rank() == 0`"
    )
    assert time.monotonic() - began < DEADLINE_S / 2 and (listener.rounds, listener.failed) == ([[0, 0]], True)
    assert two.run(lambda: 1) == [1, 1], "the workers stay usable"


def test_ranks_that_make_different_calls_are_named(two: OnWorkers) -> None:
    def function() -> None:
        train.report(step=0)
        if train.world_rank() == 0:
            train.save_checkpoint(epoch=0)
        else:
            train.report(step=1)
        time.sleep(DEADLINE_S)

    began = time.monotonic()
    with pytest.raises(ReportMismatchError, match=r"rank 1 called train.report\(\); rank 0 called train.save_check"):
        two.run(function)
    assert time.monotonic() - began < DEADLINE_S / 2, "the function need not end for this error"
    assert two.run(lambda: 1) == [1, 1]


def test_a_function_does_not_wait_for_who_reads_its_rounds(workers: OnWorkers, tmp_path: Path) -> None:
    def function(config: dict[str, str]) -> int:
        for step in range(9):
            train.report(step=step)
        Path(config["folder"], f"rank{train.world_rank()}").touch()
        wait_for(Path(config["folder"], "go"))
        return train.world_rank()

    rounds = workers.iterate(function, {"folder": str(tmp_path)})
    for rank in range(workers.ranks):
        wait_for(tmp_path / f"rank{rank}")
    with pytest.raises(TrainBackendError, match=r"function.*get_final_results\(force=True\)"):
        workers.run(function, {"folder": str(tmp_path)})
    (tmp_path / "go").touch()
    assert [row["step"] for row in next(rounds)] == [0] * workers.ranks
    assert rounds.get_final_results(force=True) == [*range(workers.ranks)]


@pytest.mark.parametrize("fails", [False, True])
def test_an_iterator_stays_with_its_run(workers: OnWorkers, fails: bool, tmp_path: Path) -> None:
    def function() -> str:
        train.report(step=0)
        if fails:
            raise NotImplementedError("mine")
        return "first"

    def second() -> str:
        wait_for(tmp_path / "go")
        return "second"

    rounds = workers.iterate(function)
    while "running" in repr(workers.trainer):
        time.sleep(0.01)
    later = workers.iterate(second)
    with pytest.raises(NotImplementedError) if fails else contextlib.nullcontext():
        assert [row["step"] for rows in rounds for row in rows] == [0] * workers.ranks
    assert rounds.get_final_results() == (None if fails else ["first"] * workers.ranks)
    (tmp_path / "go").touch()
    assert later.get_final_results(force=True) == ["second"] * workers.ranks


def test_the_iterator_yields_the_rounds_and_then_has_the_results(workers: OnWorkers) -> None:
    def function() -> int:
        for step in range(3):
            train.report(step=step)
            train.save_checkpoint(step=step)
        return train.world_rank()

    everybody = [*range(workers.ranks)]
    rounds = workers.iterate(function)
    assert [row["step"] for row in next(rounds)] == [0] * workers.ranks
    assert (rounds.is_finished(), rounds.get_final_results()) == (False, None)
    assert [[row["step"] for row in rows] for rows in rounds] == [[step] * workers.ranks for step in (1, 2)]
    assert (rounds.is_finished(), rounds.get_final_results(), list(rounds)) == (True, everybody, [])
    rounds = workers.iterate(function)
    assert rounds.get_final_results(force=True) == everybody and rounds.is_finished()
    assert workers.trainer.latest_checkpoint is not None
    assert workers.trainer.latest_checkpoint["step"] == 2, "checkpoints are received anyway"


def test_the_iterator_raises_the_functions_error_after_its_rounds(workers: OnWorkers, tmp_path: Path) -> None:
    def function(config: dict[str, str]) -> None:
        for step in range(3):
            train.report(step=step)
        wait_for(Path(config["file"]))
        raise ZeroDivisionError

    file = tmp_path / "go"
    rounds = workers.iterate(function, {"file": str(file)})
    assert [row["step"] for row in next(rounds)] == [0] * workers.ranks
    file.touch()
    with pytest.raises(ZeroDivisionError):
        list(rounds)
    assert rounds.is_finished() and list(rounds) == []
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(workers.iterate(lambda: next(iter(()))))


class StopsAfter(Callback):
    stops_training = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_result(self, result: CallResult) -> None:
        if result.metrics["step"] == self.step:
            raise TimeoutError("enough")


def test_a_callback_can_stop_the_function(workers: OnWorkers) -> None:
    def endless() -> None:
        step = 0
        while True:
            train.report({"step": step}, checkpoint=Checkpoint.from_dict({"step": step}))
            step += 1

    listener = Listener()
    with pytest.raises(TimeoutError, match="enough"):
        workers.run(endless, callbacks=[listener, StopsAfter(3)])
    assert (listener.rounds, listener.failed) == ([[step] * workers.ranks for step in range(4)], True)
    assert workers.trainer.latest_checkpoint is not None
    assert workers.trainer.latest_checkpoint["step"] >= 3, "what was saved before the end stays"
    assert workers.run(lambda: 7) == [7] * workers.ranks, "the workers stay usable"


# -- checkpoints --------------------------------------------------------------------------------------


def saves_losses() -> None:
    for loss in (2, 4, 1, 3):
        train.report({"step": loss}, checkpoint=Checkpoint.from_dict({"loss": loss}))


def test_as_many_checkpoints_are_kept_as_wanted(one: OnWorkers) -> None:
    """By a metric that was reported with each. tests/train/test_checkpoint_manager.py has the other strategies."""
    one.run(saves_losses, checkpoint_strategy=CheckpointConfig(2, "step", "max"))
    assert one.stored() == ["checkpoint_000002", "checkpoint_000004"]
    assert one.trainer.latest_checkpoint is not None and one.trainer.latest_checkpoint["loss"] == 3, "the newest one"
    found = one.trainer.best_checkpoint_path
    assert isinstance(found, Path) and train.Checkpoint(found).to_dict()["loss"] == 4


def test_the_function_gets_the_newest_checkpoint(workers: OnWorkers, tmp_path: Path) -> None:
    def function() -> list[Any]:
        found = [train.get_checkpoint()]
        train.report({"step": 0}, checkpoint=Checkpoint.from_dict({"epoch": 6}))
        found.append(train.get_checkpoint())
        train.save_checkpoint(epoch=7)
        newest = train.load_checkpoint() or {}
        assert abs(newest["_timestamp"] - time.time()) < DEADLINE_S
        return [*(each and each.to_dict()["epoch"] for each in found), newest["epoch"]]

    assert workers.run(function) == [[None, 6, 7]] * workers.ranks, "not that of an earlier run"
    assert workers.run(function, checkpoint={"epoch": 5}) == [[5, 6, 7]] * workers.ranks
    assert workers.run(function, checkpoint=workers.trainer.latest_checkpoint_path) == [[7, 6, 7]] * workers.ranks
    users_own = tmp_path / "mine"
    Checkpoint.from_dict({"epoch": 4}).to_uri(users_own)
    assert workers.run(function, checkpoint=str(users_own)) == [[4, 6, 7]] * workers.ranks


def test_of_a_rounds_checkpoints_the_one_of_the_lowest_rank_is_kept(two: OnWorkers) -> None:
    def function() -> None:
        for ranks in ((0, 1), (1,), ()):
            mine = Checkpoint.from_dict({"rank": train.world_rank()}) if train.world_rank() in ranks else None
            train.report({"step": 0}, checkpoint=mine)

    two.run(function)
    folder = two.trainer.latest_checkpoint_dir
    assert isinstance(folder, Path) and len(two.stored()) == 2
    assert [train.Checkpoint(folder / name).to_dict()["rank"] for name in two.stored()] == [0, 1]


# -- worker failures ----------------------------------------------------------------------------------


def kill_once(mark: Path) -> None:
    if once(mark):
        os.kill(os.getpid(), signal.SIGKILL)


def steps(config: dict[str, Any]) -> tuple[int, int]:
    """Report six steps, each with its checkpoint, from the newest checkpoint on. A rank ends before its fourth report by Ray's
    `exit_actor`, or is killed after it."""
    found = train.get_checkpoint()
    first = 0 if found is None else found.to_dict()["step"] + 1
    folder, size = Path(config["folder"]), train.world_size()
    for step in range(first, 6):
        fails = step == 3 and train.world_rank() == config["rank"] % size
        if fails and config["when"] == "before" and once(folder / "ended"):
            exit_actor()
        train.report({"step": step}, checkpoint=Checkpoint.from_dict({"step": step}))
        if fails and config["when"] == "after":
            kill_once(folder / "killed")
        (folder / f"{size}-{step}-{train.world_rank()}").touch()
        for rank in range(size):
            wait_for(folder / f"{size}-{step}-{rank}")  # as in a collective call
    return train.world_rank(), first


@pytest.mark.elastic
@pytest.mark.parametrize(("when", "rank"), [("before", -1), ("after", -1), ("before", 0)])
def test_after_a_worker_failure_no_report_is_lost_or_doubled(
    workers: OnWorkers, tmp_path: Path, when: str, rank: int
) -> None:
    listener, before = Listener(), len(workers.trainer.recoveries)
    results = workers.run(steps, {"folder": str(tmp_path), "when": when, "rank": rank}, callbacks=[listener])
    shown = [step for (step, *_) in listener.rounds]
    assert [rows for rows in listener.rounds if len(set(rows)) > 1] == [], "the rows of a round belong together"
    assert shown == [*range(6)]
    failure, *grown = workers.trainer.recoveries[before:]  # a growth lets the function begin again with a later step
    begun, expected = {first for _, first in results}, 3 if when == "before" else 4
    assert min(begun) >= expected and (grown or begun == {expected})
    assert [rank for rank, _ in results] == [*range(len(results))]
    assert workers.stored() == [f"checkpoint_{number:06d}" for number in range(1, 7)]
    assert (failure.reason, failure.removed_ranks) == ("worker death", (rank % workers.ranks,))
    assert failure.in_place == (workers.ranks == 2) and {each.reason for each in grown} <= {"growth"}


@pytest.mark.elastic
def test_more_worker_failures_than_allowed_end_the_run(one: OnWorkers) -> None:
    def function() -> None:
        train.report(step=0)
        os.kill(os.getpid(), signal.SIGKILL)

    listener = Listener()
    with pytest.raises(TrainingWorkerError, match="max_retries=1") as raised:
        one.run(function, callbacks=[listener])
    assert isinstance(raised.value, RuntimeError) and listener.failed
    assert len(listener.rounds) == 2, "each attempt has reported once, and nothing was saved"
    assert one.run(lambda: 1) == [1], "the trainer starts new workers"

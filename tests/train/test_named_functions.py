"""What the next script gets of a function trainer with a name, wherever the driver ends. Without a process.

The ranks report in lock step, as if a collective call were in each step. A driver ends when it commits its record: right
before or right after that is stored."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.callbacks.base import Callback
from raysgd.callbacks.callback_list import CallbackList
from raysgd.callbacks.history import History
from raysgd.core.messages import FunctionReport
from raysgd.errors import ConfigError
from raysgd.train import Checkpoint, CheckpointConfig, RunConfig
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.executor import FunctionJob
from raysgd.train.fit.records import RunRecord, StoredRun
from raysgd.train.fit.run import FitRun
from raysgd.train.named import NamedFunctions
from raysgd.train.run import FunctionRun, RoundResult, RunLeft

STEPS, RANKS = 6, 2


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in memory, because each checkpoint is synced to the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


class Ended(BaseException):
    """The driver's process has ended."""


class Tenure:
    """The keeper's record, and a driver that ends with commit number `last`, which is `stored` or not."""

    name, orphan_s, superseded = "digits", 60.0, False

    def __init__(self, record: dict[str, bytes], last: int, stored: bool) -> None:
        self.record, self._left, self._stored = record, last, stored

    def check(self) -> None:
        if self._left < 0:
            raise Ended

    def commit(self, parts: Mapping[str, bytes]) -> None:
        self.check()
        if self._left or self._stored:
            self.record.update(parts)
        self._left -= 1
        self.check()


def engine(attaches: bool = True) -> Any:
    attach = lambda **given: attaches and given["trained"] is not None  # noqa: E731
    return SimpleNamespace(attach=attach, trained=0, recoveries=[], world_size=RANKS, start=lambda: None)


class Script:
    """One script, from its start to its end, with the workers that report to it."""

    def __init__(self, folder: Path, record: dict[str, bytes], last: int, stored: bool, keeps: int | None) -> None:
        self.failed: list[BaseException] = []
        self.history, self.got = History(), list[int]()
        self.named = NamedFunctions(Tenure(record, last, stored), engine(), [("num_workers", "2")], self.history, 0)  # type: ignore[arg-type]
        self.named.take_over()
        self.manager = CheckpointManager(folder, CheckpointConfig(num_to_keep=keeps))
        left, checkpoint = self.named.next_run("train_func", {"lr": 0.1})
        if left is not None:
            self.manager.continue_with(left.directory, left.newest, left.stored, checkpoint)
        self.run = FunctionRun(
            self.named.begin(),
            self.manager,
            fail=self.failed.append,
            decode=dict,
            record=self.named,
            left=left,
        )

    def perform(self, every: int) -> list[Any]:
        """Run the function, which saves `every` so many steps, and read its rounds. Return what it returned."""
        try:
            if self.run.left.values is None:
                self._function(every)
            else:
                self.run.finish(self.run.left.values)
        finally:
            self.run.close(Ended() if self.failed else None)
        if self.run.error is not None:
            raise self.run.error
        self._read()
        return self.run.values

    def _function(self, every: int) -> None:
        self._read()
        found, attempt = self.manager.latest, self.run.begin_attempt(RANKS)
        for step in range(0 if found is None else found.to_dict()["step"] + 1, STEPS):
            payload = Checkpoint.from_dict({"step": step}).to_bytes() if step % every == every - 1 else b""
            acknowledged: list[int] = []
            for rank in range(RANKS):
                head = pickle.dumps({"step": step})
                message = FunctionReport("report", self.run.number, attempt.number, rank, len(head), bool(payload))
                self.run.receive(message, head + payload, lambda: acknowledged.append(0))  # noqa: B023
                assert rank == RANKS - 1 or len(acknowledged) == 1, "an incomplete round is in no record"
            until = time.monotonic() + 60
            while len(acknowledged) < RANKS and not self.failed and time.monotonic() < until:
                time.sleep(0.001)
            if self.failed:
                raise self.failed[0]
            self._read(1)  # and is busy with it during the next step
        self.run.finish([pickle.dumps(("done", rank)) for rank in range(RANKS)])

    def _read(self, most: int = STEPS) -> None:
        """Be the user's loop over rounds. A round is in the history before the body of the loop begins."""
        with contextlib.suppress(queue.Empty):
            while most and (result := self.run.next_round(0)) is not None:
                most -= 1
                self.got.append(result.rows[0]["step"])
                self.history.on_resume([*self.history.rows, result.rows[0]])


def scripts(folder: Path, ends: list[tuple[int, bool]], *, every: int = 1, keeps: int | None = 2) -> list[Script]:
    """Start the script again and again, until it comes to its end. It ends earlier as `ends` says. Return those that began a
    run."""
    record: dict[str, bytes] = {}
    made: list[Script] = []
    for last, stored in [*ends, (1000, True)]:
        try:
            made.append(Script(folder, record, last, stored, keeps))
            assert made[-1].perform(every) == [("done", rank) for rank in range(RANKS)]
        except Ended:
            continue
    return made


def stored(folder: Path) -> dict[str, int]:
    return {path.name[-6:]: Checkpoint(path).to_dict()["step"] for path in sorted(folder.iterdir())}


ENDS = [(last, stored) for last in range(4 + 2 * STEPS) for stored in (False, True)]


@pytest.mark.parametrize("keeps", [0, 1])
def test_each_round_is_shown_once_but_for_the_one_with_which_the_script_was_busy(memory: Path, keeps: int) -> None:
    for number, end in enumerate(ENDS):
        folder = memory / str(number)
        folder.mkdir()
        made = scripts(folder, [end, (number % 5, True)], keeps=keeps)
        assert [row["step"] for row in made[-1].history] == [*range(STEPS)]
        for before, after in itertools.pairwise(made):
            assert not before.got or not after.got or after.got[0] in (before.got[-1], before.got[-1] + 1)
        assert stored(folder) == {f"{step + 1:06d}": step for step in range(STEPS - keeps, STEPS)}
        latest = made[-1].manager.latest
        assert latest is not None and latest.to_dict()["step"] == STEPS - 1


def test_a_function_that_saves_now_and_then_reports_again_what_followed_its_checkpoint(memory: Path) -> None:
    for number, end in enumerate(ENDS):
        folder = memory / str(number)
        folder.mkdir()
        steps = [row["step"] for row in scripts(folder, [end], every=3, keeps=None)[-1].history]
        expected = [0, 1, 2, 3, 4, 5]
        again = next((at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]), len(steps))
        assert [*steps[:again], *steps[again:]][:again] == expected[:again] and steps[again:] in (
            [],
            expected[:],
            [3, 4, 5],
        )
        assert stored(folder) == {"000001": 2, "000002": 5}


def test_a_run_that_has_returned_is_not_made_again(memory: Path) -> None:
    record: dict[str, bytes] = {}
    values = Script(memory, record, 1000, True, 1).perform(1)
    again = Script(memory, record, 1000, True, 1)
    assert again.run.left.values is not None and again.perform(1) == values and again.got == []
    assert [row["step"] for row in again.history] == [*range(STEPS)]


def test_what_differs_is_named(memory: Path) -> None:
    record: dict[str, bytes] = {}
    Script(memory, record, 1000, True, 2).run.close()
    named = NamedFunctions(Tenure(record, 1000, True), engine(), [("num_workers", "2")], None, 0)  # type: ignore[arg-type]
    named.take_over()
    for name, config, text in (
        ("train_func", {"lr": 0.2}, r"config\['lr'\]=0.2"),
        ("other", {"lr": 0.1}, "function=other"),
    ):
        with pytest.raises(ConfigError, match=text):
            named.next_run(name, config)
    assert named.next_run("train_func", {"lr": 0.1})[0] is not None


def test_a_run_continues_from_its_checkpoint_although_no_worker_is_left(memory: Path, caplog: Any) -> None:
    record: dict[str, bytes] = {}
    with pytest.raises(Ended):
        Script(memory, record, 6, True, 2).perform(1)
    named = NamedFunctions(Tenure(record, 1000, True), engine(attaches=False), [("num_workers", "2")], History(), 7)  # type: ignore[arg-type]
    named.take_over()
    assert named.earlier == 0 and not named.attached and "starting new ones" in caplog.text
    left, _ = named.next_run("train_func", {"lr": 0.1})
    assert left is not None and left.newest == 3 and [each.number for each in left.stored] == [2, 3]


class Executor:
    """Workers of which the last script has left a run: they report the rounds that it had not done with, and the rest."""

    named, is_started, earlier, history, superseded = None, False, 1, None, False

    def __init__(self, left: RunLeft, rounds: list[RoundResult]) -> None:
        self.left, self.rounds, self.world_size, self.ends = left, iter(rounds), RANKS, list[bool]()
        self.rows_before: list[dict[str, Any]] = []
        self.recoveries_of_run: list[Any] = []

    def start(self) -> None:
        self.is_started = True

    def left_of(self, *_: Any) -> RunLeft:
        return self.left

    def start_training(self, *_: Any, ready: Any, **__: Any) -> None:
        ready()

    def processes(self) -> list[Any]:
        return []

    def fetch_next_round(self, on_poll: Any) -> RoundResult | None:
        if (found := next(self.rounds, None)) is not None and found.rows[0]["step"] < 0:
            raise Ended
        return found

    def finish_training(self) -> list[Any]:
        return ["done"] * RANKS

    def cancel(self, error: BaseException) -> None: ...

    def unfetched_rounds(self) -> list[RoundResult]:
        return list(self.rounds)

    def shutdown(self, *, leave: bool = False) -> None:
        self.ends.append(leave)


def test_fit_writes_each_report_once_although_its_script_had_written_some_that_it_was_not_done_with(
    tmp_path: Path,
) -> None:
    def round_(step: int) -> RoundResult:
        return RoundResult([{"step": step}] * RANKS, -1)

    def fit(left: RunLeft, rounds: list[RoundResult], *, superseded: bool = False, restored: Any = None) -> Any:
        made.append(Executor(left, rounds))
        made[-1].superseded = superseded
        config = RunConfig(name="digits", storage_path=tmp_path, orphan_s=60)
        return FitRun("Trainer", config, History(), restored=restored).run(
            FunctionJob(make=lambda: made[-1], function=len), {}
        )  # type: ignore[arg-type, return-value]

    made: list[Executor] = []
    folder = tmp_path / "digits"
    other = tmp_path / "other"
    for each in (folder, other):
        RunRecord(each, each, "Trainer", {}, None).begin({})
    with pytest.raises(Ended):  # a run that was restored: there was one report, and this one wrote 1 to 4
        fit(RunLeft(folder), [round_(0), round_(1), round_(-1), round_(2), round_(3)])
    left = RunLeft(folder, reports=3, unshown=(round_(2), round_(3)))
    assert len(StoredRun.read(folder).rows) == 4
    with pytest.raises(Ended):  # and returns when another script has taken over
        fit(left, [round_(2), round_(-1), round_(3)], superseded=True)
    assert len(StoredRun.read(folder).rows) == 2 and StoredRun.read(folder).status == "running"
    with pytest.raises(ConfigError, match=r"restores .*other: restore that one"):
        fit(left, [], restored=other)
    result = fit(left, [round_(2), round_(3), round_(4)])
    rows = StoredRun.read(folder).rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and result.return_values == ["done"] * RANKS
    assert [row["training_iteration"] for row in rows] == [1, 2, 3, 4, 5]
    assert [each.ends for each in made] == [[True], [True], [True], [False]], "the workers wait after an error"


def test_the_checkpoints_of_a_run_that_is_restored_stay(memory: Path) -> None:
    earlier, payload = CheckpointManager(memory), Checkpoint.from_dict({"step": 5}).to_bytes()
    earlier.store(earlier.register(payload), payload, {})
    (memory / "checkpoint_best.pt").touch()  # the user's
    (memory / "checkpoint_000003").touch()  # stored when its driver ended, and in no record
    restored = CheckpointManager(memory)
    restored.stored, restored.latest_id = earlier.stored, 5  # number 5 was reported, and not kept
    run = FunctionRun(1, restored, fail=print, decode=dict)
    left = run.left
    run.close()
    manager = CheckpointManager(memory)
    manager.continue_with(left.directory, left.newest, left.stored, b"")
    assert sorted(path.name for path in memory.iterdir()) == ["checkpoint_000001", "checkpoint_best.pt"]
    assert manager.payload == payload and manager.latest_id == 5


def test_callbacks_of_a_run_that_continues_get_the_rows_of_this_run(memory: Path) -> None:
    class Seen(Callback):
        rows: Any = ()

        def on_resume(self, rows: Any) -> None:
            self.rows = [row["step"] for row in rows]

    record: dict[str, bytes] = {}
    for expected in ([], [], []), ([0, 1], [2], []):
        history = History()
        named = NamedFunctions(Tenure(record, 1000, True), engine(), [("num_workers", "2")], history, 0)  # type: ignore[arg-type]
        named.take_over()
        for run, steps, found in zip("abc", ([0, 1], [0, 1, 2], [0, 1, 2]), expected, strict=True):
            seen = Seen()
            left, _ = named.next_run(run, {})
            CallbackList([history, seen]).resume(named.rows, but=history)
            assert [*seen.rows] == found and named.begin() == "abc".index(run) + 1
            if left is None:
                named.keep(RunLeft(memory))
                history.on_resume([{"step": step} for step in steps])
                named.keep(RunLeft(memory), shown=True)
        assert history.column("step") == [0, 1, 2]
        del record["run 2"]  # the script ends right before the third run begins
        state = pickle.loads(record["state"])
        record["state"] = pickle.dumps({**state, "runs": 2})


def test_how_many_runs_there_were_is_that_of_a_script_that_began_one(memory: Path) -> None:
    record: dict[str, bytes] = {}
    for earlier in (3, 7):
        named = NamedFunctions(Tenure(record, 1000, True), engine(), [("num_workers", "2")], None, earlier)  # type: ignore[arg-type]
        named.take_over()
        assert named.earlier == earlier
    named.next_run("train_func", {}), named.begin(), named.keep(RunLeft(memory))
    named = NamedFunctions(Tenure(record, 1000, True), engine(), [("num_workers", "2")], None, 9)  # type: ignore[arg-type]
    named.take_over()
    assert named.earlier == 7

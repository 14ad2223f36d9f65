"""The watchdog of one call asks for stacks, kills the ranks that block the others, and waits for late answers."""

import weakref
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import Moved, ProgressReport
from raysgd.core.control import report_interval_s
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Interrupted, WorkerFailed
from raysgd.core.protocols import Call
from raysgd.engine.call import FanOut
from raysgd.engine.watchdog import Watchdog, ask
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.calls import SMALL
from raysgd.workers.events import CallEnded
from tests.engine.fake_group import FakeGroup, MessageReceived, Ok, StackReport, WorkerEnded, reporting

LIMIT_S = 10.0


def test_no_worker_is_late_because_the_driver_was_stopped() -> None:
    """After Ctrl-Z and `fg`, what workers have sent meanwhile is read a moment later."""
    now, stopped_s = [1000.0], [60.0, 0.0, 0.0]
    group = FakeGroup(names="ab", run=None)
    table = group.table(lambda: now[0])
    workers = table.launch(2)

    def poll(timeout: float) -> list[Any]:
        away_s = stopped_s.pop(0) if stopped_s else 0.0
        now[0] += timeout + away_s
        group.silence |= dict.fromkeys(workers, away_s)
        return [] if stopped_s else [CallEnded(worker, call, Ok()) for call, worker in enumerate(workers, 1)]

    group.poll = poll  # type: ignore[method-assign]
    assert list(ask(table, workers, "run", {}, limit_s=LIMIT_S)) == workers
    assert group.killed == [] and table.clock() < 1000 + LIMIT_S


def test_answers_to_another_request_are_not_taken() -> None:
    """A replacement whose set-up takes too long is asked for its stack while the watchdog waits for stacks."""
    group = FakeGroup(names="ab")
    table = group.table(lambda: 1000.0)
    table.launch(2)
    mine, other = table.request_stacks(["a"]), table.request_stacks(["b"])
    group.events += [
        MessageReceived("a", StackReport(mine, ("train",))),
        MessageReceived("b", StackReport(other, ("set up",))),
    ]
    table.pump(0.0)
    assert table.take_answers(StackReport, other) == [("b", StackReport(other, ("set up",)))]
    assert table.take_answers(StackReport, mine) == [("a", StackReport(mine, ("train",)))]
    assert table.take_answers(StackReport, mine) == []


def asks(table: Any) -> None:
    ask(table, table.members(), "run", {}, limit_s=LIMIT_S)


def fans_out(table: Any) -> None:
    FanOut(table, MagicMock(), MagicMock(), lambda job: False).run(Call(print))


@pytest.mark.parametrize("wait", [asks, fans_out])
def test_the_answer_to_a_call_that_ctrl_c_has_ended_is_noted_and_not_kept(
    wait: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup(names="ab", run=None)
    table = group.table()
    table.enter_group(table.launch(2))
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(group, "poll", MagicMock(side_effect=KeyboardInterrupt))
        wait(table)
    value = Event()
    group.events += [CallEnded("b", 2, Ok(value, Progress(step=3)))]
    kept = weakref.ref(value)
    del value
    table.pump(0.0)
    assert kept() is None and (table["b"].progress.step, table["b"].is_exact) == (3, True)


def test_no_rank_is_late_after_ctrl_c_because_the_driver_was_in_a_callback() -> None:
    """The rank has answered meanwhile."""
    now, group = [1000.0], FakeGroup(names="a", run=None)

    def takes_long(info: Any) -> None:
        now[0] += 6.0

    table = WorkerTable(group, clock=lambda: now[0], on_progress=takes_long)  # type: ignore[arg-type]
    table.enter_group(table.launch(1))
    report = MessageReceived("a", ProgressReport(1, Progress(step=1)))
    happens = [KeyboardInterrupt, [report], [CallEnded("a", 1, Ok())]]
    group.poll = MagicMock(side_effect=happens)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fans_out(table)
    assert group.killed == []


class Watched:
    """Ranks that train in steps of `step_s`, in virtual time, with a watchdog whose limit is `limit_s`. Ranks in
    `running` make progress, and the others have ended their calls."""

    def __init__(self, ranks: int, running: range, *, step_s: float, limit_s: float) -> None:
        self.now, self.step_s = 1000.0, step_s
        self.group = FakeGroup(names=map(str, range(ranks)), run=None)
        self.table = self.group.table(lambda: self.now)
        self.workers = self.table.launch(ranks)
        self.running = [str(rank) for rank in running]
        self._watchdog = Watchdog(self.table, self.workers, limit_s)
        self._controls = {worker: self._control(worker, ranks) for worker in self.running}

    def _control(self, worker: str, ranks: int) -> Any:
        call = self.group.submit(worker, "run", {})
        self.table.expect(worker, call)
        return reporting(self.group, worker, call, int(worker), ranks, lambda: self.now)

    def tick(self, **more: Any) -> None:
        self._watchdog.tick(self.running, **more)

    def train(self, seconds: float) -> None:
        for step in range(int(seconds / self.step_s)):
            for control in self._controls.values():
                if control.due():
                    control.report(Progress(step=step))
            self.table.pump(0.0)
            self.tick()
            self.now += self.step_s
            self.tick()


HANG_S = 5.0


@pytest.mark.parametrize(("ranks", "left"), [(1, 1), (2, 300), (300, 1), (300, 300)])
def test_no_rank_that_makes_progress_is_suspected(ranks: int, left: int) -> None:
    """Not even asked for its stack, however short the limit is: neither while all ranks train, nor when only a few are
    still in their call, as in a validation."""
    watched = Watched(ranks, range(max(ranks - left, 0), ranks), step_s=0.4, limit_s=HANG_S)
    watched.train(3 * report_interval_s(ranks) + 2 * HANG_S)
    assert (watched.group.asked, watched.group.killed) == (0, [])


@pytest.mark.parametrize("ranks", [2, 300])
def test_a_rank_that_is_silent_for_a_moment_is_not_suspected_in_a_large_group(ranks: int) -> None:
    watched = Watched(ranks, range(ranks), step_s=0.4, limit_s=40.0)
    watched.train(2 * report_interval_s(ranks))
    watched.group.silence["1"] = 3.0
    watched.train(0.4)
    assert (watched.group.asked, watched.group.killed) == (0, [])


@pytest.mark.parametrize("ranks", [2, 300])
def test_a_call_without_progress_is_found_after_the_limit_in_a_group_of_any_size(ranks: int) -> None:
    """All ranks stop at once. They do not answer, and have sent nothing since."""
    watched = Watched(ranks, range(ranks), step_s=0.4, limit_s=HANG_S)
    watched.train(2 * report_interval_s(ranks))
    stopped_at = watched.now
    while not watched.group.killed:
        watched.now += 0.5
        watched.group.silence.update(dict.fromkeys(watched.workers, watched.now - stopped_at))
        watched.tick()
    assert HANG_S <= watched.now - stopped_at <= HANG_S + 1.0


IN_COLLECTIVE = ("/x/torch/distributed/distributed_c10d.py:3 all_reduce", "/u/train.py:7 train_epoch")
COMPUTES = ("/u/train.py:9 train_batch",)


def leave(stacks: dict[str, tuple[str, ...]], *, limit_s: float, has_survivor: bool) -> tuple[float, list[str]]:
    """Interrupt ranks that do not leave the frames `stacks`. Return after how long the first one is killed, and which."""
    ranks = len(stacks) + 2  # one has failed, and one may have survived
    watched = Watched(ranks, range(len(stacks)), step_s=0.4, limit_s=limit_s)
    watched.train(2 * report_interval_s(ranks))
    began, watched.group.stacks = watched.now, stacks
    while not watched.group.killed and watched.now < began + 3 * limit_s:
        watched.now += 0.5
        watched.tick(interrupted_s=watched.now - began, has_survivor=has_survivor)
        watched.table.pump(0.0)
    return watched.now - began, watched.group.killed


@pytest.mark.parametrize(
    ("limit_s", "after_s"), [(600.0, 60.0), (60.0, 10.0)], ids=["a tenth of the limit", "10 seconds at least"]
)
def test_a_rank_that_does_not_leave_a_collective_call_is_killed(limit_s: float, after_s: float) -> None:
    """If the connections' end does not end the call, another rank has the state of the training, so waiting saves nothing."""
    seconds, killed = leave({"0": IN_COLLECTIVE, "1": COMPUTES}, limit_s=limit_s, has_survivor=True)
    assert killed == ["0"] and after_s <= seconds <= after_s + 6.0


def test_only_ranks_in_collective_calls_have_to_leave_soon() -> None:
    seconds, killed = leave({"0": COMPUTES}, limit_s=60.0, has_survivor=True)
    assert killed == ["0"] and seconds >= 60.0


def test_the_last_rank_with_the_state_is_not_killed_before_the_limit() -> None:
    seconds, _ = leave({"0": IN_COLLECTIVE}, limit_s=60.0, has_survivor=False)
    assert seconds >= 60.0


def test_ranks_that_were_interrupted_a_moment_ago_are_not_blamed() -> None:
    """A rank that hung was killed at the limit, so there has been no progress for that long, and its peers are about to
    leave."""
    watched = Watched(3, range(2), step_s=0.4, limit_s=20.0)
    watched.now += 21.0
    watched.group.stacks = dict.fromkeys(watched.running, IN_COLLECTIVE)
    for interrupted_s in (0.1, 0.2):
        watched.tick(interrupted_s=interrupted_s)
        watched.table.pump(0.0)
    assert watched.group.asked and watched.group.killed == []


def test_a_transfer_that_moves_is_progress() -> None:
    now, group = [1000.0], FakeGroup(names="a")
    table = group.table(lambda: now[0])
    table.launch(1)
    watchdog = Watchdog(table, ["a"], LIMIT_S)
    for _ in range(3):
        now[0] += LIMIT_S - 1
        group.events.append(MessageReceived("a", Moved()))
        table.pump(0)
        watchdog.tick(["a"])
    assert table["a"].moved_at == now[0] and group.killed == []


class SlowNetwork(FakeGroup):
    """Each worker has the arguments of a call after `takes_s`, in virtual time. They arrive bit by bit, at one of them until
    its machine fails at `fails_at`."""

    def __init__(self, takes_s: dict[str, float], fails_at: dict[str, float]) -> None:
        super().__init__(names=takes_s)
        self.now, self.log = 0.0, list[tuple[str, str, float]]()
        self._takes_s, self._fails_at = takes_s, fails_at
        self._under_way: dict[str, tuple[float, int]] = {}

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        self.log.append((verb, worker, self.now))
        takes_s = self._takes_s[worker] if arguments else 0.0
        self._under_way[worker] = self.now + takes_s, next(self._calls)
        return self._under_way[worker][1]

    def poll(self, timeout: float) -> list[Any]:
        self.now += timeout
        events: list[Any] = []
        for worker, (there_at, call) in list(self._under_way.items()):
            if self.now >= min(there_at, self._fails_at.get(worker, there_at)):
                del self._under_way[worker]
                failed = there_at > self.now
                events.append(WorkerEnded(worker, "unplugged") if failed else CallEnded(worker, call, Ok()))
            else:
                events.append(MessageReceived(worker, Moved()))
        return events


def slow_call(fails_at: dict[str, float]) -> tuple[SlowNetwork, FanOut]:
    group = SlowNetwork({"a": 1.0, "b": 3 * LIMIT_S}, fails_at)
    table = WorkerTable(group, clock=lambda: group.now)  # type: ignore[arg-type]
    table.enter_group(table.launch(2))
    limits = SimpleNamespace(hang_s=LIMIT_S)
    job = SimpleNamespace(is_waiting=lambda: False, hurry_s=None, on_return=lambda rank: None)
    fan_out = FanOut(table, MagicMock(limits=limits, number=1), job, lambda job: False)  # type: ignore[arg-type]
    fan_out.run(Call(print, {"state": Blob(bytes(SMALL))}))
    return group, fan_out


def test_all_ranks_begin_a_call_when_the_last_one_has_its_arguments() -> None:
    """Otherwise the first one would wait for it in a collective call, which has a time limit. And the last one does not
    hang."""
    group, fan_out = slow_call({})
    assert [worker for verb, worker, at in group.log if verb == "run" and at >= 3 * LIMIT_S] == ["a", "b"]
    assert group.killed == [] and fan_out.outcomes == {"a": Ok(), "b": Ok()}


def test_a_call_whose_arguments_do_not_reach_a_worker_has_failed() -> None:
    group, fan_out = slow_call({"b": LIMIT_S})
    assert "run" not in {verb for verb, _, _ in group.log}
    assert isinstance(fan_out.outcomes["b"], WorkerFailed)
    assert isinstance(fan_out.outcomes["a"], Interrupted)  # it has the arguments, and no answer

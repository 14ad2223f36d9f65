"""The inline group: one worker, this very process, through the same calls as any other group."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.core.messages import ProgressReport
from raysgd.outcomes import Failed, Interrupted, Ok
from raysgd.progress import Control, Progress
from raysgd.protocols import Call
from raysgd.rendezvous import RankInfo, SingleWorkerBackend
from raysgd.workers.events import CallEnded, MessageReceived, WorkerStarted
from raysgd.workers.inline_group import InlineGroup


class FakeReplica:
    """Answers with what it was asked; raises what it is given."""

    def __init__(self, rank_info: RankInfo, control: Control) -> None:
        self.rank_info, self.control, self.closed = rank_info, control, 0
        self.progress = Progress(step=3)

    def run(self, call: Call) -> Any:
        return call.method(self, **call.arguments)

    def throw(self, error: BaseException) -> None:
        raise error

    def report(self) -> None:
        self.control.report(Progress(step=4), {"loss": 1.0})

    def answer(self, answer: Any) -> Any:
        return answer

    def joined(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    def partial(self) -> dict[str, Any]:
        return {}

    def state(self) -> bytes:
        return b"state"

    def load(self, data: bytes) -> None:
        self.loaded = data

    def close(self) -> None:
        self.closed += 1


class Hosting:
    """An inline group with a replica in it."""

    def __init__(self) -> None:
        self.group = InlineGroup(SingleWorkerBackend())
        (self.worker,) = self.group.launch(1)
        self.arrival = self.group.poll(0)
        self.do("build", factory=self._make, rank_info=RankInfo())

    def _make(self, rank_info: RankInfo, control: Control) -> FakeReplica:
        self.replica = FakeReplica(rank_info, control)
        return self.replica

    def do(self, verb: str, **arguments: Any) -> Any:
        call = self.group.submit(self.worker, verb, arguments)
        (event,) = self.group.poll(0)
        assert isinstance(event, CallEnded)
        assert event.call == call
        return event.outcome

    def run(self, method: Callable[..., Any], **arguments: Any) -> Any:
        return self.do("run", call=Call(method, arguments))


@pytest.fixture
def hosting() -> Hosting:
    return Hosting()


def test_the_worker_is_this_process(hosting: Hosting) -> None:
    (event,) = hosting.arrival
    assert isinstance(event, WorkerStarted)
    assert event.pid == os.getpid()


def test_there_is_only_one(hosting: Hosting) -> None:
    with pytest.raises(RuntimeError, match="one worker"):
        hosting.group.launch(1)
    with pytest.raises(RuntimeError, match="one worker"):
        InlineGroup(SingleWorkerBackend()).launch(2)
    assert hosting.group.room() == 0


def test_answers_come_with_progress_and_nothing_is_copied(hosting: Hosting) -> None:
    given = object()
    assert hosting.group.pack(given) is given
    outcome = hosting.run(FakeReplica.answer, answer=given)
    assert isinstance(outcome, Ok)
    assert outcome.value is given
    assert outcome.progress.step == 3


def test_the_users_very_own_exception_comes_back(hosting: Hosting) -> None:
    class Unpicklable(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("own")
            self.lock = one, two

    error = Unpicklable(1, 2)
    outcome = hosting.run(FakeReplica.throw, error=error)
    assert isinstance(outcome, Failed)
    assert outcome.error is error
    assert "FakeReplica" in outcome.traceback or "run" in outcome.traceback


def test_sys_exit_in_user_code_does_not_end_the_script(hosting: Hosting) -> None:
    outcome = hosting.run(FakeReplica.throw, error=SystemExit(3))
    assert isinstance(outcome, Failed)
    assert "sys.exit(3)" in str(outcome.error)


def test_ctrl_c_reaches_the_user(hosting: Hosting) -> None:
    with pytest.raises(KeyboardInterrupt):
        hosting.run(FakeReplica.throw, error=KeyboardInterrupt())


def test_an_interrupted_call_stays_interrupted(hosting: Hosting) -> None:
    given = Interrupted({"loss": 1.0}, "stopped", asked=True)
    assert hosting.run(FakeReplica.answer, answer=given) is given


def test_a_call_without_a_replica_fails_with_words() -> None:
    group = InlineGroup(SingleWorkerBackend())
    (worker,) = group.launch(1)
    group.poll(0)
    group.submit(worker, "run", {"call": Call(FakeReplica.report)})
    (event,) = group.poll(0)
    assert isinstance(event, CallEnded)
    assert isinstance(event.outcome, Failed)
    assert "hosts no replica" in str(event.outcome.error)


def test_progress_goes_straight_to_the_listener(hosting: Hosting) -> None:
    heard: list[Any] = []
    hosting.group.listener = heard.append
    hosting.run(FakeReplica.report)
    (event,) = heard
    assert isinstance(event, MessageReceived)
    assert isinstance(event.message, ProgressReport)
    assert event.message.progress.step == 4
    assert event.message.partial == {"loss": 1.0}


def test_the_hook_runs_when_the_worker_is_prepared(hosting: Hosting) -> None:
    ran: list[int] = []
    assert isinstance(hosting.do("prepare", hook=lambda: ran.append(1)), Ok)
    assert isinstance(hosting.do("prepare", hook=None), Ok)
    assert ran == [1]


def test_stopping_closes_the_replica_once(hosting: Hosting) -> None:
    hosting.group.stop()
    hosting.group.stop()
    assert hosting.replica.closed == 1


def test_it_cannot_be_killed(hosting: Hosting) -> None:
    with pytest.raises(RuntimeError, match="cannot be killed"):
        hosting.group.kill(hosting.worker)

"""The contract of a group of workers: what the engine relies on, in Ray, in this process and in the simulation."""

import os
import platform
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from raysgd.config import WorkerResources
from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import Interrupt, ProgressReport, StackReport, StackRequest
from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.core.ranks import RankInfo
from raysgd.engine.worker_info import WorkerInfo
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.inline_group import InlineGroup
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.transfer import Transfer
from raysgd.workers.worker_group import WorkerGroupProtocol
from tests import faults
from tests.simulation.checker import Checker
from tests.simulation.faults import Schedule
from tests.simulation.group import SimGroup
from tests.simulation.plan import Plan
from tests.simulation.world import World

POLL_S, POLLS = 0.1, 600


class PlannedError(Exception):
    """A user's own error, whose `__init__` needs more arguments than its `args` has."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


class Probe:
    """A replica that returns what it is given, and raises what it is given."""

    def __init__(self, rank_info: RankInfo, control: Control) -> None:
        self.rank_info, self.control, self.closed = rank_info, control, 0
        self.progress = Progress(step=3)
        self._pause = threading.Event().wait

    def run(self, call: Call) -> Any:
        return call.method(self, **call.arguments)

    def give_back(self, value: Any) -> Any:
        return value

    def throw(self, error: BaseException) -> None:
        raise error

    def throw_new(self, kind: type[BaseException], arguments: Sequence[Any]) -> None:
        raise kind(*arguments)

    def report(self) -> None:
        self.control.report(Progress(step=4), Measured({"loss": 1.0}))

    def wait(self) -> str:
        """Return when the driver interrupts."""
        while not self.control.interrupted:
            with self.control._changed:
                self.control._changed.wait(0.05)
        return "interrupted"

    def joined(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    def partial(self) -> dict[str, Any]:
        return {}

    def state(self) -> bytes:
        return b"state"

    def load(self, data: bytes) -> None:
        """Do nothing, because there is no state."""

    def close(self) -> None:
        self.closed += 1


# -- the implementations ------------------------------------------------------------------------------


class Subject:
    """One implementation, its workers, and what tests need of it in addition to the protocol."""

    size = 2
    settle_s = 0.0

    def __init__(self, group: WorkerGroupProtocol) -> None:
        self.group = group
        self.workers: list[str] = []
        self.starts: list[WorkerStarted] = []
        self.heard: list[Event] = []
        group.listener = self.heard.append

    def launch(self) -> None:
        self.workers = self.group.launch(self.size)
        self.starts = [event for event in self.until(WorkerStarted, self.size) if isinstance(event, WorkerStarted)]

    def build(self) -> None:
        for worker in self.workers:
            assert isinstance(self.perform(worker, "build", factory=Probe, rank_info=RankInfo()), Ok)

    def until(self, kind: type[Event], count: int = 1) -> list[Event]:
        """Return all events up to the `count`th one of this type."""
        found: list[Event] = []
        for _ in range(POLLS):
            found += [*self.group.poll(POLL_S), *self._from_listener()]
            if sum(isinstance(event, kind) for event in found) >= count:
                return found
        raise AssertionError(f"waited for {count} {kind.__name__}, and there were {found}")

    def settle(self) -> list[Event]:
        """Return the events that follow."""
        found: list[Event] = []
        for _ in range(1 + int(self.settle_s / POLL_S)):
            found += [*self.group.poll(POLL_S), *self._from_listener()]
        return found

    def _from_listener(self) -> list[Event]:
        heard, self.heard[:] = list(self.heard), []
        return heard

    def perform(self, worker: str, verb: str, *, generation: int = 0, **arguments: Any) -> Outcome:
        call = self.group.submit(worker, verb, arguments, generation=generation)
        (reply,) = [event for event in self.until(CallEnded) if isinstance(event, CallEnded)]
        assert (reply.worker, reply.call) == (worker, call)
        return reply.outcome

    def run(self, worker: str, method: Callable[..., Any], **arguments: Any) -> Outcome:
        return self.perform(worker, "run", call=Call(method, arguments))

    def ended(self, worker: str) -> bool:
        """Return whether the worker's process has ended."""
        raise NotImplementedError

    def crash(self, worker: str) -> None:
        """Kill the worker's process without using the group."""
        raise NotImplementedError

    def freeze(self, worker: str) -> None:
        """Stop the worker's process, so that it sends nothing."""
        raise NotImplementedError

    def thaw(self, worker: str) -> None:
        """Let a frozen process continue."""
        raise NotImplementedError


class Inline(Subject):
    size = 1

    def __init__(self) -> None:
        super().__init__(InlineGroup(SingleWorkerBackend()))

    def ended(self, worker: str) -> bool:
        return True  # the worker is this process, in which only the replica ends


class InRay(Subject):
    settle_s = 0.6

    def __init__(self) -> None:
        super().__init__(RayGroup(SingleWorkerBackend(), WorkerResources(cpus=1), unreachable_s=20.0))

    def _pid(self, worker: str) -> int:
        return next(event.pid for event in self.starts if event.worker == worker)

    def ended(self, worker: str) -> bool:
        return faults.ended(self._pid(worker), within_s=60)

    def crash(self, worker: str) -> None:
        os.kill(self._pid(worker), signal.SIGKILL)

    def freeze(self, worker: str) -> None:
        os.kill(self._pid(worker), signal.SIGSTOP)

    def thaw(self, worker: str) -> None:
        os.kill(self._pid(worker), signal.SIGCONT)


class Simulated(Subject):
    settle_s = 5.0  # of virtual time, in which Ray reports the end of an actor up to 3 s late

    def __init__(self) -> None:
        plan, world = Plan(nodes=(2, 2)), World(0)
        checker = Checker(plan)
        schedule = checker.schedule = Schedule(world, plan, checker)
        self._sim = schedule.group = SimGroup(world, plan, checker, schedule)
        super().__init__(self._sim)

    def ended(self, worker: str) -> bool:
        self.settle()
        return not self._sim.workers[worker].alive

    def crash(self, worker: str) -> None:
        self._sim.workers[worker].die()

    def freeze(self, worker: str) -> None:
        self._sim.workers[worker].stop()

    def thaw(self, worker: str) -> None:
        self._sim.workers[worker].resume()


KINDS: dict[str, type[Subject]] = {"ray": InRay, "inline": Inline, "simulated": Simulated}
ALL = [*KINDS]
# The inline worker is the driver's own process. It cannot be killed, cannot fail alone, and reads no messages, because
# its only thread is busy with training. Its own behaviour is tested below.
REMOTE = ["ray", "simulated"]
# Only Ray's workers receive pickled arguments, and only Ray has references.
PICKLED, SAME_MEMORY = ["ray"], ["inline", "simulated"]


def started(request: pytest.FixtureRequest) -> Subject:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Return workers that host a replica, for tests that do not end them."""
    subject = started(request)
    subject.launch()
    subject.build()
    yield subject
    subject.group.stop()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Return a group without workers."""
    subject = started(request)
    yield subject
    subject.group.stop()


def each(fixture: str, kinds: Sequence[str]) -> pytest.MarkDecorator:
    """Run the test on these implementations."""
    return pytest.mark.parametrize(fixture, kinds, indirect=True)


class Noted:
    """A value that notes where it is pickled."""

    pickled: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        self.pickled.append(os.getpid())
        return Noted, ()


@each("shared", PICKLED)
def test_the_arguments_of_all_ranks_are_pickled_once(shared: Subject) -> None:
    Noted.pickled.clear()
    arguments = {"call": Call(Probe.give_back, {"value": (Noted(), "kept")})}
    calls = [shared.group.submit(worker, "run", arguments, generation=7) for worker in shared.workers]
    ended = [event for event in shared.until(CallEnded, len(calls)) if isinstance(event, CallEnded)]
    assert sorted(event.call for event in ended) == sorted(calls)
    assert all(isinstance(event.outcome, Ok) and event.outcome.value[1] == "kept" for event in ended)
    assert Noted.pickled == [os.getpid()]
    outcome = shared.run(shared.workers[0], Probe.give_back, value=2)
    assert isinstance(outcome, Ok) and outcome.value == 2, "other arguments are sent, too"


@each("shared", PICKLED)
def test_large_arguments_and_answers_move_beside_the_messages(shared: Subject) -> None:
    """The worker and the driver see them move. When the call has ended, the group does not keep them."""
    content = np.random.default_rng(1).integers(0, 255, 5_000_000, dtype=np.uint8)
    expected, kept = content.tobytes(), weakref.ref(content)
    arguments = {"call": Call(Probe.give_back, {"value": Blob(content)})}
    calls = {shared.group.submit(worker, "run", arguments): worker for worker in shared.workers}
    ended = [event for event in shared.until(CallEnded, len(calls)) if isinstance(event, CallEnded)]
    for event in ended:
        assert calls[event.call] == event.worker and isinstance(event.outcome, Ok)
        assert bytes(event.outcome.value.data) == expected
    del content, arguments
    for _ in faults.until(lambda: kept() is None):  # the thread that sent it may not have ended yet
        time.sleep(0.01)
    outcome = shared.run(shared.workers[0], Probe.give_back, value=["x" * 100_000, Blob(b"y" * 100_000)])
    assert isinstance(outcome, Ok) and outcome.value[0] == "x" * 100_000 and outcome.value[1].data == b"y" * 100_000


@each("shared", PICKLED)
def test_a_worker_that_cannot_take_its_arguments_is_interrupted(
    shared: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what it had before, and the call can be repeated."""
    with monkeypatch.context() as during:
        during.setattr(Transfer, "fill", lambda transfer, data: transfer.close())
        outcome = shared.run(shared.workers[0], Probe.give_back, value=Blob(bytes(100_000)))
    assert isinstance(outcome, Interrupted) and outcome.progress.step == 3 and not outcome.asked
    assert isinstance(shared.run(shared.workers[0], Probe.give_back, value=Blob(bytes(100_000))), Ok)


@each("shared", ALL)
def test_a_call_whose_arguments_are_sent_first(shared: Subject) -> None:
    worker, call = shared.workers[0], Call(Probe.give_back, {"value": 5})
    assert isinstance(shared.perform(worker, "keep", call=call), Ok)
    outcome = shared.perform(worker, "run")
    assert isinstance(outcome, Ok) and outcome.value == 5


# -- workers start and end ----------------------------------------------------------------------------


@each("fresh", ALL)
def test_each_launched_worker_starts_once_and_takes_room(fresh: Subject) -> None:
    group, before = fresh.group, fresh.group.room()
    room, most = before.free, before.capacity
    assert most >= room >= fresh.size
    fresh.launch()
    assert len(set(fresh.workers)) == fresh.size
    assert sorted(event.worker for event in fresh.starts) == sorted(fresh.workers)
    assert all(event.pid > 0 and group.is_node_alive(event.node) for event in fresh.starts)
    assert fresh.settle() == []
    for _ in range(POLLS):
        if group.room().free == room - fresh.size:
            break
        assert group.poll(POLL_S) == []
    assert (group.room().free, group.room().capacity) == (room - fresh.size, most)
    outcome = fresh.run(fresh.workers[0], Probe.give_back, value=1)
    assert isinstance(outcome, Failed) and "hosts no replica" in str(outcome.error)
    with group.releasing():
        for worker in fresh.workers:
            group.dismiss(worker)
    for _ in range(POLLS):
        if group.room().free == room:
            break
        assert group.poll(POLL_S) == []
    assert group.room().free == room, "the resources of dismissed workers are free"
    assert fresh.settle() == [], "a worker that was dismissed is not reported"
    assert all(fresh.ended(worker) for worker in fresh.workers)


@each("fresh", REMOTE)
def test_the_failure_of_a_worker_is_reported_exactly_once(fresh: Subject) -> None:
    """The driver kills one worker, and the other one crashes. Each has a call that never ends."""
    fresh.launch()
    fresh.build()
    killed, crashed = fresh.workers
    for worker in fresh.workers:
        fresh.group.submit(worker, "run", {"call": Call(Probe.wait)})
    fresh.group.kill(killed)
    first = fresh.until(WorkerEnded)
    assert [(type(event), event.worker) for event in first] == [(WorkerEnded, killed)]
    fresh.crash(crashed)
    second = fresh.until(WorkerEnded)
    assert [(type(event), event.worker) for event in second] == [(WorkerEnded, crashed)]
    assert all(
        isinstance(event, WorkerEnded) and event.cause and event.reason == "worker death" for event in first + second
    )
    for worker in fresh.workers:
        assert not fresh.group.send(worker, StackRequest(1))
        fresh.group.submit(worker, "run", {"call": Call(Probe.wait)})
        fresh.group.kill(worker)
    assert fresh.settle() == [], "each failure is reported once, and calls of a failed worker have no reply"
    for worker in fresh.workers:
        fresh.group.dismiss(worker)
    assert fresh.settle() == []


@each("fresh", REMOTE)
def test_a_worker_can_be_dismissed_before_it_has_started(fresh: Subject) -> None:
    (worker,) = fresh.group.launch(1)
    assert fresh.group.silent_for(worker) == 0.0
    fresh.group.dismiss(worker)
    fresh.group.dismiss(worker)
    assert fresh.settle() == []
    assert not fresh.group.send(worker, StackRequest(1))


@each("fresh", ALL)
def test_stop_ends_all_workers_and_can_be_called_twice(fresh: Subject) -> None:
    fresh.launch()
    fresh.group.stop()
    assert all(fresh.ended(worker) for worker in fresh.workers)
    fresh.group.stop()
    assert fresh.settle() == []


def test_the_inline_group_has_one_worker_and_it_cannot_be_killed() -> None:
    subject = Inline()
    subject.launch()
    with pytest.raises(RuntimeError, match="one worker"):
        subject.group.launch(1)
    with pytest.raises(RuntimeError, match="one worker"):
        InlineGroup(SingleWorkerBackend()).launch(2)
    with pytest.raises(RuntimeError, match="cannot be killed"):
        subject.group.kill(subject.workers[0])
    assert subject.starts[0].pid == os.getpid()
    assert not subject.group.send(subject.workers[0], StackRequest(1)), "no thread reads messages"
    assert subject.group.silent_for(subject.workers[0]) == 0.0


def test_the_inline_worker_is_on_this_machine_under_its_whole_name() -> None:
    group = InlineGroup(SingleWorkerBackend())
    group.launch(1)
    (started,) = group.poll(0)
    assert isinstance(started, WorkerStarted)
    assert WorkerInfo("inline", node=started.node).machine == platform.node()
    assert WorkerInfo("one", node="0123456789abcdef" * 3 + "01234567").machine == "01234567"


def test_the_inline_group_closes_its_replica_once() -> None:
    subject = Inline()
    subject.launch()
    made: list[Probe] = []

    def make(rank_info: RankInfo, control: Control) -> Probe:
        made.append(Probe(rank_info, control))
        return made[0]

    subject.perform(subject.workers[0], "build", factory=make, rank_info=RankInfo())
    subject.group.stop()
    subject.group.stop()
    assert [probe.closed for probe in made] == [1]


# -- calls --------------------------------------------------------------------------------------------


@each("shared", ALL)
def test_every_call_has_one_reply_with_its_number(shared: Subject) -> None:
    calls = {}
    for value in range(3):
        for worker in shared.workers:
            number = shared.group.submit(worker, "run", {"call": Call(Probe.give_back, {"value": (worker, value)})})
            calls[number] = worker, value
    assert len(calls) == 3 * shared.size
    replies = [
        event for event in [*shared.until(CallEnded, len(calls)), *shared.settle()] if isinstance(event, CallEnded)
    ]
    assert sorted(reply.call for reply in replies) == sorted(calls)
    for worker in shared.workers:
        own = [reply.call for reply in replies if reply.worker == worker]
        assert own == sorted(own), "the calls of a worker are made in the order in which they were submitted"
    for reply in replies:
        assert isinstance(reply.outcome, Ok) and tuple(reply.outcome.value) == calls[reply.call]
        assert reply.outcome.progress.step == 3, "a reply has the progress of the replica"


@each("shared", ALL)
@pytest.mark.parametrize(("kind", "arguments"), [(PlannedError, ("planned", 7)), (KeyError, ("planned",))])
def test_a_users_error_is_a_failed_outcome_and_the_worker_continues(
    shared: Subject, kind: type[BaseException], arguments: Sequence[Any]
) -> None:
    outcome = shared.run(shared.workers[0], Probe.throw_new, kind=kind, arguments=arguments)
    assert isinstance(outcome, Failed) and type(outcome.error) is kind
    assert outcome.error.args == ("planned",) and vars(outcome.error) == vars(kind(*arguments))
    assert "in throw_new" in outcome.traceback
    again = shared.run(shared.workers[0], Probe.give_back, value="more")
    assert isinstance(again, Ok) and again.value == "more"


@each("shared", ALL)
def test_sys_exit_in_the_users_code_ends_neither_the_worker_nor_the_script(shared: Subject) -> None:
    outcome = shared.run(shared.workers[0], Probe.throw_new, kind=SystemExit, arguments=(3,))
    assert isinstance(outcome, Failed) and "sys.exit(3)" in str(outcome.error)


@each("shared", SAME_MEMORY)
def test_an_error_that_is_not_pickled_is_the_users_own_object(shared: Subject) -> None:
    error = PlannedError("planned", 7)
    outcome = shared.run(shared.workers[0], Probe.throw, error=error)
    assert isinstance(outcome, Failed) and outcome.error is error


@each("shared", ALL)
def test_an_interrupted_call_stays_interrupted(shared: Subject) -> None:
    given = Interrupted({"loss": 1.0}, "stopped", asked=True)
    assert shared.run(shared.workers[0], Probe.give_back, value=given) == given


def test_ctrl_c_in_the_inline_worker_reaches_the_user() -> None:
    subject = Inline()
    subject.launch()
    subject.build()
    with pytest.raises(KeyboardInterrupt):
        subject.run(subject.workers[0], Probe.throw, error=KeyboardInterrupt())
    subject.group.stop()


@each("shared", ALL)
def test_a_hook_runs_on_the_worker(shared: Subject) -> None:
    assert isinstance(shared.perform(shared.workers[0], "prepare", hook=None), Ok)
    failed = shared.perform(shared.workers[0], "prepare", hook=planned_hook)
    assert isinstance(failed, Failed) and type(failed.error) is PlannedError


def planned_hook() -> None:
    raise PlannedError("in the hook", 7)


@each("shared", SAME_MEMORY)
def test_objects_are_not_copied_within_one_process(shared: Subject) -> None:
    lock = threading.Lock()
    outcome = shared.run(shared.workers[0], Probe.give_back, value=lock)
    assert isinstance(outcome, Ok) and outcome.value is lock


# -- messages -----------------------------------------------------------------------------------------


@each("shared", ALL)
def test_progress_is_reported_with_the_number_of_its_call(shared: Subject) -> None:
    worker = shared.workers[-1]
    call = shared.group.submit(worker, "run", {"call": Call(Probe.report)})
    events = [*shared.until(CallEnded), *shared.settle()]
    (heard,) = [event for event in events if isinstance(event, MessageReceived)]
    assert (heard.worker, heard.message) == (worker, ProgressReport(call, Progress(step=4), Measured({"loss": 1.0})))


@each("shared", ALL)
def test_sending_to_an_unknown_worker_fails(shared: Subject) -> None:
    assert not shared.group.send("unknown", StackRequest(1))
    assert shared.group.silent_for("unknown") == 0.0


@each("shared", REMOTE)
def test_messages_reach_a_running_call_of_the_same_generation(shared: Subject) -> None:
    worker = shared.workers[0]
    shared.perform(worker, "join", rank_info=RankInfo(solo=True), settings={}, generation=2)
    call = shared.group.submit(worker, "run", {"call": Call(Probe.wait)})
    assert shared.group.send(worker, StackRequest(8))
    (stack,) = shared.until(MessageReceived)
    assert isinstance(stack, MessageReceived) and isinstance(stack.message, StackReport) and stack.message.round == 8
    assert shared.group.send(worker, Interrupt(1))
    assert shared.settle() == [], "an interrupt of an old generation is ignored"
    assert shared.group.send(worker, Interrupt(2))
    (reply,) = shared.until(CallEnded)
    assert isinstance(reply, CallEnded) and reply.call == call
    assert isinstance(reply.outcome, Ok) and reply.outcome.value == "interrupted"
    shared.perform(worker, "join", rank_info=RankInfo(solo=True), settings={}, generation=3)


@each("shared", REMOTE)
def test_silence_is_measured_from_the_last_message(shared: Subject) -> None:
    worker, other = shared.workers
    shared.freeze(worker)
    try:
        for _ in range(POLLS):
            shared.group.poll(POLL_S)
            if shared.group.silent_for(worker) > max(2.5, shared.group.silent_for(other)):
                break
        else:
            raise AssertionError("the frozen worker does not count as silent")
    finally:
        shared.thaw(worker)
    for _ in range(POLLS):
        shared.group.poll(POLL_S)
        if shared.group.silent_for(worker) < 2.0:
            return
    raise AssertionError("the worker sends again, and counts as silent")


# -- the cluster --------------------------------------------------------------------------------------


@each("shared", ALL)
def test_the_state_of_the_cluster(shared: Subject) -> None:
    assert shared.group.draining() == {}
    assert all(shared.group.is_node_alive(event.node) for event in shared.starts)
    assert shared.size == 1 or shared.group.room().demand(3) == f"3 CPU ({shared.group.room().free} free)"
    assert shared.size == 1 or not shared.group.is_node_alive("unknown")

"""The contract of a backend: it connects ranks, can end a rank's wait, and can be left at any moment.

The driver's object is in this process. Its pickled copies are in other processes, in which a second thread calls
`abort`, as the control thread does."""

import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

from raysgd.core.protocols import ProcessGroupBackend, SingleWorkerBackend
from raysgd.core.ranks import RankInfo, assign_ranks
from tests.forked_workers import fresh_processes

JOIN_S, COLLECTIVE_S = 30.0, 90.0
SOON_S = 20.0  # well below the limit of a collective
ANSWER_S = 240.0  # also for the imports of a new process


# -- a rank's process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a rank returned: a value, or an error, and whether the backend considers it an interruption."""

    value: Any = None
    error: str = ""
    interruption: bool = False
    seconds: float = 0.0


def serve(backend: ProcessGroupBackend, add: Callable[[int, float], float], orders: Connection) -> None:
    """Make the calls that the driver asks for on the main thread, and call `abort` on a second one."""
    waiting: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            try:
                name, arguments = orders.recv()
            except EOFError:
                os._exit(0)
            if name == "abort":
                backend.abort()
            else:
                waiting.put((name, arguments))

    threading.Thread(target=listen, daemon=True).start()
    own: dict[str, Callable[..., Any]] = {"add": add, "fail": fail}
    while True:
        name, arguments = waiting.get()
        began = time.monotonic()
        try:
            value = own.get(name, getattr(backend, name, None))(*arguments)  # type: ignore[misc]
            answer = Answer(value, seconds=time.monotonic() - began)
        except Exception as error:
            seconds = time.monotonic() - began
            answer = Answer(None, f"{type(error).__name__}: {error}", backend.is_interruption(error), seconds)
        orders.send(answer)


def fail() -> None:
    raise ValueError("the user's own")


def add_alone(size: int, value: float) -> float:
    return value


def add_gloo(size: int, value: float) -> float:
    import torch

    total = torch.tensor([value])
    torch.distributed.all_reduce(total)
    return float(total)


def add_horovod(size: int, value: float) -> float:
    import horovod.torch as hvd
    import torch

    return float(hvd.allreduce(torch.tensor([value]), op=hvd.Sum, name="add"))


def add_tensorflow(size: int, value: float) -> float:
    import tensorflow as tf

    from raysgd.tf.channel import Channel

    return float(Channel(size).sum([tf.constant([value])])[0][0])


# -- the implementations ------------------------------------------------------------------------------


def gloo() -> ProcessGroupBackend:
    from raysgd.torch.group.process_group import TorchBackend

    return TorchBackend("gloo", join_s=JOIN_S, collective_s=COLLECTIVE_S)


def horovod() -> ProcessGroupBackend:
    from raysgd.horovod.backend import HorovodBackend

    return HorovodBackend(join_s=JOIN_S, collective_s=COLLECTIVE_S)


def tensorflow() -> ProcessGroupBackend:
    pytest.importorskip("tensorflow")
    from raysgd.tf.process_group import TensorFlowBackend

    return TensorFlowBackend(join_s=JOIN_S, threads=1)


@dataclass(frozen=True)
class Kind:
    """An implementation, and a collective with which its ranks add numbers."""

    make: Callable[[], ProcessGroupBackend]
    add: Callable[[int, float], float]
    size: int = 2


KINDS = {
    "none": Kind(SingleWorkerBackend, add_alone, size=1),
    "gloo": Kind(gloo, add_gloo),
    "horovod": Kind(horovod, add_horovod),
    "tensorflow": Kind(tensorflow, add_tensorflow),
}


class Rank:
    """One rank's process."""

    def __init__(self, backend: ProcessGroupBackend, kind: Kind) -> None:
        context = fresh_processes()
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(backend, kind.add, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, name: str, *arguments: Any) -> None:
        self._orders.send((name, arguments))

    def answers_within(self, seconds: float) -> bool:
        return self._orders.poll(seconds)

    def end(self) -> Answer:
        assert self.answers_within(ANSWER_S), "the rank has not answered"
        answer: Answer = self._orders.recv()
        return answer

    def do(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        answer = self.end()
        assert not answer.error, answer.error
        return answer.value

    def abort(self) -> None:
        self._orders.send(("abort", ()))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._orders.close()


class Ranks:
    """The driver's backend, and the ranks' processes."""

    def __init__(self, name: str) -> None:
        self.kind = KINDS[name]
        self.driver = self.kind.make()
        self.ranks = [Rank(self.driver, self.kind) for _ in range(self.kind.size)]
        self._generation = 0

    def plan(self) -> list[tuple[RankInfo, dict[str, Any]]]:
        """Open the next rendezvous. Return each rank's arguments of `join`."""
        self._generation += 1
        infos = assign_ranks(["node"] * self.kind.size, generation=self._generation)
        offers = [rank.do("offer") for rank in self.ranks] if self.driver.needs_offers else []
        settings = self.driver.plan(infos, offers)
        assert len(settings) == len(infos)
        return list(zip(infos, pickle.loads(pickle.dumps(settings)), strict=True))

    def all(self, name: str, *arguments: Any) -> list[Any]:
        return [rank.do(name, *arguments) for rank in self.ranks]

    def join(self) -> list[Answer]:
        for rank, planned in zip(self.ranks, self.plan(), strict=True):
            rank.begin("join", *planned)
        return [rank.end() for rank in self.ranks]

    def check_sum(self) -> None:
        for number, rank in enumerate(self.ranks, start=1):
            rank.begin("add", self.kind.size, float(number))
        answers = [rank.end() for rank in self.ranks]
        assert [answer.value for answer in answers] == [sum(range(1, self.kind.size + 1))] * self.kind.size, answers

    def close(self) -> None:
        self.driver.plan([])
        for rank in self.ranks:
            rank.kill()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Start two processes that have not joined a generation yet, or one for the backend of a single worker."""
    made = Ranks(request.param)
    yield made
    made.close()


def on(*names: str) -> pytest.MarkDecorator:
    """Run the test on these implementations."""
    marks = {"horovod": pytest.mark.horovod}
    return pytest.mark.parametrize(
        "ranks", [pytest.param(name, marks=marks.get(name, ())) for name in names], indirect=True
    )


# -- the contract, in the order in which a process sees it --------------------------------------------


@on(*KINDS)
def test_a_rank_can_leave_and_abort_before_it_joins(ranks: Ranks) -> None:
    for rank in ranks.ranks:
        rank.abort()
        rank.do("leave")
        rank.do("leave")
        assert rank.do("collectives") in (0, -1)


# A process joins TensorFlow's runtime only once, so it must not do that alone.
@on("none", "gloo", "horovod")
def test_a_replacement_worker_joins_a_group_of_its_own(ranks: Ranks) -> None:
    ranks.ranks[0].do("join", RankInfo(solo=True), {})
    assert ranks.ranks[0].do("add", 1, 5.0) == 5.0
    ranks.ranks[0].do("leave")


# SingleWorkerBackend has no peers, and TensorFlow's first rank owns the rendezvous, which the driver cannot close.
@on("gloo", "horovod")
def test_a_rank_does_not_wait_at_a_closed_rendezvous(ranks: Ranks) -> None:
    planned = ranks.plan()
    assert ranks.driver.plan([]) == []
    ranks.ranks[1].begin("join", *planned[1])
    answer = ranks.ranks[1].end()
    assert answer.error and answer.interruption, "the rank can join the next generation"
    assert answer.seconds < SOON_S
    ranks.all("leave")


@on(*KINDS)
def test_two_generations_and_an_abort_between_them(ranks: Ranks) -> None:
    assert [answer.error for answer in ranks.join()] == [""] * ranks.kind.size
    before = ranks.all("collectives")
    ranks.check_sum()
    counted = [now - earlier for now, earlier in zip(ranks.all("collectives"), before, strict=True)]
    assert len(set(before)) == 1 and set(counted) in ({0}, {1}), "all ranks count the same calls, or none"
    ranks.ranks[0].begin("fail")
    answer = ranks.ranks[0].end()
    assert answer.error == "ValueError: the user's own" and not answer.interruption
    if ranks.kind.size > 1:
        check_abort(ranks)
    ranks.all("leave")
    ranks.all("leave")
    if ranks.driver.in_place:
        assert [answer.error for answer in ranks.join()] == [""] * ranks.kind.size
        ranks.check_sum()
        ranks.all("leave")
    else:
        assert all("twice in one process" in answer.error and not answer.interruption for answer in ranks.join())
    assert ranks.driver.plan([]) == []


def check_abort(ranks: Ranks) -> None:
    """Check that `abort` ends the wait of a rank in a collective that no peer begins."""
    waiting = ranks.ranks[0]
    waiting.begin("add", ranks.kind.size, 1.0)
    assert not waiting.answers_within(0.5)
    waiting.abort()
    answer = waiting.end()
    assert answer.error and answer.interruption, answer
    assert answer.seconds < SOON_S


@on("gloo", "horovod")
def test_the_failure_of_a_peer_ends_a_ranks_wait(ranks: Ranks) -> None:
    """The last test of these processes."""
    check_failure(ranks)


@pytest.mark.nightly
def test_the_failure_of_a_tensorflow_peer_ends_a_ranks_wait() -> None:
    """A process joins TensorFlow's runtime only once, so this test starts its own processes."""
    ranks = Ranks("tensorflow")
    try:
        check_failure(ranks)
    finally:
        ranks.close()


def check_failure(ranks: Ranks) -> None:
    assert [answer.error for answer in ranks.join()] == ["", ""]
    survivor, peer = ranks.ranks
    survivor.begin("add", 2, 1.0)
    assert not survivor.answers_within(0.3)
    peer.kill()
    answer = survivor.end()
    assert answer.error and answer.interruption, answer
    assert answer.seconds < SOON_S
    survivor.do("leave")
    survivor.do("leave")
    assert ranks.driver.plan([]) == []

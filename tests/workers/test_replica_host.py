"""A replica host returns an outcome for every call, in the form in which it is sent to the driver."""

import pickle
from typing import Any

import pytest

from raysgd.core.control import Control
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.core.ranks import RankInfo
from raysgd.workers.calls import with_value
from raysgd.workers.replica_host import ReplicaHost


class Counted:
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return Counted, ()


class Echo:
    """A replica that returns what it is given."""

    progress = Progress(step=3)

    def run(self, call: Call) -> Any:
        return call.arguments["value"]

    def partial(self) -> None:
        return None


def host_of_echo(backend: SingleWorkerBackend | None = None) -> ReplicaHost:
    host = ReplicaHost(backend or SingleWorkerBackend(), Control())
    built = host.perform("build", {"factory": lambda rank_info, control: Echo(), "rank_info": RankInfo()})
    assert isinstance(built, Ok)
    return host


def answer(value: Any) -> Any:
    return host_of_echo().perform("run", {"call": Call(Echo.run, {"value": value})})


class Cut(SingleWorkerBackend):
    """A backend whose group was aborted in a call, as NCCL's can be without an error."""

    aborted = False

    def ensure_whole(self, *, unless_seen: bool = False) -> None:
        if self.aborted:
            raise InterruptedError("a part may be missing")

    def is_interruption(self, error: BaseException) -> bool:
        return isinstance(error, InterruptedError)


def test_a_value_is_not_returned_that_may_come_from_a_part_of_a_sum() -> None:
    backend = Cut()
    host = host_of_echo(backend)
    backend.aborted = True
    outcome = host.perform("run", {"call": Call(Echo.run, {"value": 7})})
    assert isinstance(outcome, Interrupted) and "a part may be missing" in outcome.cause


class Raises(Echo):
    """A replica whose user code raises an error."""

    def run(self, call: Call) -> Any:
        raise call.arguments["error"]

    def state(self) -> Any:
        raise ValueError("the user's state_dict")


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("error", [ValueError(), KeyError(), RuntimeError(), OSError(), SystemExit(3)], ids=repr)
def test_while_a_failure_is_handled_every_exception_is_an_interruption(error: Any, interrupted: bool) -> None:
    control = Control()
    host = ReplicaHost(SingleWorkerBackend(), control)
    host.perform("build", {"factory": lambda rank_info, control: Raises(), "rank_info": RankInfo()})
    if interrupted:
        control.interrupt()
    outcome = host.perform("run", {"call": Call(Raises.run, {"error": error})})
    assert isinstance(outcome, Interrupted if interrupted and isinstance(error, Exception) else Failed)
    assert isinstance(host.perform("state", {"transfer": ""}), Failed)  # no peer takes part in that


class Loads(Echo):
    """Loads states, of which an empty one raises an error, as user code can."""

    def joined(self, rank_info: RankInfo) -> None:
        pass

    def load(self, data: bytes) -> None:
        if not data:
            raise ValueError("the user's load_state_dict")


def test_a_worker_says_whether_it_has_the_state_of_its_group() -> None:
    control = Control()
    host = ReplicaHost(SingleWorkerBackend(), control)
    factory = {"factory": lambda rank_info, control: Loads()}
    alone, joined = RankInfo(solo=True), {"rank_info": RankInfo(world_size=2), "settings": {}}

    def lacks_state(verb: str, **arguments: Any) -> tuple[type[Outcome], bool]:
        outcome = host.perform(verb, arguments)
        return type(outcome), outcome.progress.lacks_state

    def taken(name: str) -> bytes:
        if name == "ended":
            raise ConnectionError("the transfer has ended")
        return name.encode()

    control.take = taken
    assert lacks_state("warm", hook=None, rank_info=alone, settings={}, **factory) == (Ok, True)
    assert lacks_state("load", transfer="ended") == (Interrupted, True)
    assert lacks_state("load", transfer="") == (Failed, True)
    assert lacks_state("load", transfer="a state") == (Ok, False)
    assert lacks_state("load", transfer="ended") == (Interrupted, False), "it has what it had"
    assert lacks_state("warm", hook=None, rank_info=alone, settings={}, **factory) == (Ok, True)
    assert lacks_state("join", **joined) == (Ok, False), "because the ranks have agreed on one"
    host = ReplicaHost(SingleWorkerBackend(), control)
    assert lacks_state("build", rank_info=RankInfo(world_size=2), **factory) == (Ok, True), "until a call"
    assert lacks_state("run", call=Call(Loads.run, {"value": 1})) == (Ok, False), "with which all ranks begin alike"


def test_an_answer_is_pickled_only_once() -> None:
    before = Counted.pickled
    received = with_value(pickle.loads(pickle.dumps(answer(Counted()), protocol=5)))
    assert isinstance(received, Ok) and isinstance(received.value, Counted) and received.progress.step == 3
    assert Counted.pickled == before + 1

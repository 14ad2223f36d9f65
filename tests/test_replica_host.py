"""A replica host returns an outcome for every call, in the form in which it is sent to the driver."""

import pickle
import threading
from typing import Any

from raysgd.core.outcomes import Failed, Ok
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo, SingleWorkerBackend
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


def host_of_echo() -> ReplicaHost:
    host = ReplicaHost(SingleWorkerBackend(), Control())
    built = host.perform("build", {"factory": lambda rank_info, control: Echo(), "rank_info": RankInfo()})
    assert isinstance(built, Ok)
    return host


def answer(value: Any) -> Any:
    return host_of_echo().perform("run", {"call": Call(Echo.run, {"value": value})})


def test_an_answer_is_pickled_only_once() -> None:
    before = Counted.pickled
    received = with_value(pickle.loads(pickle.dumps(answer(Counted()), protocol=5)))
    assert isinstance(received, Ok) and isinstance(received.value, Counted) and received.progress.step == 3
    assert Counted.pickled == before + 1


def test_an_answer_that_cannot_be_pickled_is_an_error_that_names_it() -> None:
    outcome = answer({"loss": 1.0, "lock": threading.Lock()})
    assert isinstance(outcome, Failed) and isinstance(outcome.error, TypeError)
    assert "'lock'" in str(outcome.error) and "'loss'" not in str(outcome.error)

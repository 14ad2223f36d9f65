"""What is an interruption, and what is the user's own error; and that a process joins once."""

import pickle

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.rendezvous import RankInfo, assign_ranks  # noqa: E402
from raysgd.tf.backend import TensorFlowBackend  # noqa: E402
from raysgd.tf.meeting import MeetingFailed  # noqa: E402


def unavailable(text: str) -> Exception:
    return tf.errors.UnavailableError(None, None, text)


def test_the_runtimes_own_errors_are_interruptions() -> None:
    backend = TensorFlowBackend()
    assert backend.is_interruption(unavailable("Collective ops is aborted by: Connection reset by peer"))
    assert backend.is_interruption(MeetingFailed("nobody came"))
    assert not backend.is_interruption(unavailable("the bucket is not there"))
    assert not backend.is_interruption(ValueError("Collective"))
    assert not backend.is_interruption(tf.errors.InvalidArgumentError(None, None, "Collective sizes differ"))


def test_an_error_raised_while_handling_one_counts_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise unavailable("Collective ops is aborted by: a peer left this generation")
        except tf.errors.OpError:
            {}["result"]
    assert TensorFlowBackend().is_interruption(caught.value)


def test_plans_are_for_each_generation() -> None:
    backend = TensorFlowBackend(host="127.0.0.1")
    assert backend.plan(assign_ranks(["a"])) == [{}], "one rank has nobody to meet"
    first, second = (backend.plan(assign_ranks(["a", "b"])) for _ in range(2))
    assert len(first) == 2 and first[0] == first[1] != second[0]
    copy = pickle.loads(pickle.dumps(backend))
    assert (copy._point, copy.in_place) == (None, False)
    assert backend.plan([]) == []


def test_nobody_joins_twice() -> None:
    backend = TensorFlowBackend()
    backend._strategy = object()
    with pytest.raises(RuntimeError, match="twice in one process"):
        backend.join(RankInfo(world_size=2), {})

"""Which errors are interruptions and which are user errors, and the addresses that workers offer."""

import pickle

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.core.ranks import assign_ranks  # noqa: E402
from raysgd.tf.ports import NoFreePortError  # noqa: E402
from raysgd.tf.process_group import TensorFlowBackend  # noqa: E402


def unavailable(text: str) -> Exception:
    return tf.errors.UnavailableError(None, None, text)


def test_the_runtimes_own_errors_are_interruptions() -> None:
    backend = TensorFlowBackend()
    assert backend.is_interruption(unavailable("Collective ops is aborted by: Connection reset by peer"))
    assert backend.is_interruption(NoFreePortError("all are taken"))
    assert not backend.is_interruption(unavailable("the bucket is not there"))
    assert not backend.is_interruption(ValueError("Collective"))
    assert not backend.is_interruption(tf.errors.InvalidArgumentError(None, None, "Collective sizes differ"))


def test_an_error_raised_while_handling_an_interruption_counts_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise unavailable("Collective ops is aborted by: a peer left this generation")
        except tf.errors.OpError:
            {}["result"]
    assert TensorFlowBackend().is_interruption(caught.value)


def test_every_rank_receives_the_offered_addresses() -> None:
    driver = TensorFlowBackend(host="127.0.0.1")
    ranks = [pickle.loads(pickle.dumps(driver)) for _ in range(2)]
    offers = [rank.offer() for rank in ranks]
    addresses = [offer["address"] for offer in offers]
    assert len(set(addresses)) == 2 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert driver.plan(assign_ranks(["a", "b"]), offers) == [{"addresses": addresses}] * 2
    assert driver.plan([]) == []
    again = ranks[0].offer()
    assert ranks[0]._port.number == int(again["address"].rpartition(":")[2]), "the newest port is held"
    for rank in ranks:
        rank._release()

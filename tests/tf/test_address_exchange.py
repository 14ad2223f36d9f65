"""TensorFlow's ranks get each other's addresses by calls to the workers, so no socket is open that others could use."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from raysgd.core.ranks import assign_ranks
from raysgd.tf.cluster_config import HeldPort
from raysgd.tf.function_backend import TensorflowFunctionBackend
from tests.attacks.attackers import listening

COUNT = 3


@pytest.fixture
def ranks() -> Iterator[list[TensorflowFunctionBackend]]:
    ranks = [TensorflowFunctionBackend(host="127.0.0.1") for _ in range(COUNT)]
    yield ranks
    for rank in ranks:
        rank.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at this process through /proc and netlink")
def test_nothing_listens_while_addresses_are_exchanged(ranks: list[TensorflowFunctionBackend]) -> None:
    before = listening([os.getpid()])
    offers = [rank.offer() for rank in ranks]
    plans = TensorflowFunctionBackend(host="127.0.0.1").plan(assign_ranks(["a"] * COUNT), offers)
    assert listening([os.getpid()]) == before
    assert [plan["addresses"] for plan in plans] == [[offer["address"] for offer in offers]] * COUNT


def test_a_held_port_accepts_no_connection() -> None:
    port = HeldPort()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number))
    port.release()


def test_the_address_is_of_the_interface_towards_the_driver() -> None:
    port = HeldPort()
    assert port.address_towards("127.0.0.1") == f"127.0.0.1:{port.number}"
    with contextlib.suppress(OSError):  # no IPv6 here
        assert port.address_towards("::1") == f"[::1]:{port.number}"
    port.release()

"""The connections of a process group are distinguished from all others, and shut down."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from raysgd.torch.sockets import Connections, GlooConnections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connect() -> Iterator[Callable[[], Pair]]:
    """Return a function that opens a loopback connection and returns both ends."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:

        def pair() -> Pair:
            near = stack.enter_context(socket.create_connection(server.getsockname(), timeout=5))
            far = stack.enter_context(server.accept()[0])
            far.settimeout(0.2)
            return near, far

        yield pair


def is_shut(pair: Pair) -> bool:
    try:
        return pair[1].recv(1) == b""
    except TimeoutError:
        return False


def open_one(connections: Connections, connect: Callable[[], Pair]) -> Pair:
    """Open a connection during a rendezvous. Return both ends."""
    connections.opening()
    pair = connect()
    connections.opened()
    return pair


def test_only_connections_opened_during_a_rendezvous_are_shut(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    pairs = [connect(), open_one(connections, connect), connect()]
    connections.shut()
    assert [is_shut(pair) for pair in pairs] == [False, True, False]


def test_a_repeated_rendezvous_forgets_no_connection(connect: Callable[[], Pair]) -> None:
    """A function calls `hvd.init()` in each of its runs."""
    connections = Connections()
    own = open_one(connections, connect)
    connections.opening()
    connections.opened()
    connections.shut()
    assert is_shut(own)


def test_connections_are_shut_during_a_rendezvous(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    first = open_one(connections, connect)
    connections.opening()
    second = connect()
    connections.shut()
    assert is_shut(first) and is_shut(second)


def test_forgotten_connections_stay_open(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    own = open_one(connections, connect)
    connections.forget()
    connections.shut()
    assert not is_shut(own)


# -- gloo's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("during", [False, True], ids=["after", "during the forming"])
def test_connections_to_a_listener_of_the_group_are_shut(connect: Callable[[], Pair], during: bool) -> None:
    gloo = GlooConnections()
    with ExitStack() as stack:
        with gloo.forming():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            own = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
            accepted = stack.enter_context(listener.accept()[0])
            other = connect()
            if during:
                gloo.shut()
        assert gloo.own == [listener.getsockname()]
        gloo.shut()
        accepted.settimeout(0.2)
        assert is_shut((accepted, own)) and not is_shut(other)
        stack.enter_context(
            socket.create_connection(listener.getsockname(), timeout=5)
        )  # the listening socket is still open


def test_connections_to_a_peer_and_to_the_store_are_shut(connect: Callable[[], Pair]) -> None:
    gloo = GlooConnections()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        own = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
        accepted = stack.enter_context(listener.accept()[0])
        other = connect()
        gloo.add_remote([("::ffff:127.0.0.1", listener.getsockname()[1])])
        gloo.shut()
        assert is_shut((own, accepted)) and not is_shut(other)
    gloo.forget()
    assert gloo.own == []

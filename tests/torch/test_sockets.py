"""The connections of a meeting, told from all others, and shut."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from raysgd.torch.sockets import Connections, GlooConnections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connect() -> Iterator[Callable[[], Pair]]:
    """Makes a connection over the loopback; both its ends."""
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


def meet(connections: Connections, connect: Callable[[], Pair]) -> Pair:
    """A meeting in which one connection is opened."""
    connections.opening()
    pair = connect()
    connections.opened()
    return pair


def test_only_what_the_meeting_opened_is_shut(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    pairs = [connect(), meet(connections, connect), connect()]
    connections.shut()
    assert [is_shut(pair) for pair in pairs] == [False, True, False]


def test_a_meeting_that_is_said_again_forgets_nothing(connect: Callable[[], Pair]) -> None:
    """A function that says `hvd.init()` in each of its runs."""
    connections = Connections()
    own = meet(connections, connect)
    connections.opening()
    connections.opened()
    connections.shut()
    assert is_shut(own)


def test_in_the_middle_of_a_meeting(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    first = meet(connections, connect)
    connections.opening()
    second = connect()
    connections.shut()
    assert is_shut(first) and is_shut(second)


def test_what_is_forgotten_is_left_alone(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    own = meet(connections, connect)
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
        stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))  # it still listens


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

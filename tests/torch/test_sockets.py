"""The connections of a process group are distinguished from all others, and shut down."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from raysgd.torch.group.sockets import Connections, GlooConnections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connect() -> Iterator[Callable[[], Pair]]:
    """Return a function that opens a loopback connection and returns both ends."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:

        def pair() -> Pair:
            near = stack.enter_context(socket.create_connection(server.getsockname(), timeout=5))
            return near, stack.enter_context(server.accept()[0])

        yield pair


def received_end(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def is_shut(pair: Pair) -> bool:
    return received_end(pair[1])


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


@pytest.mark.parametrize("listening", [False, True])
def test_only_those_of_nccl_no_longer_listen_after_an_abort(listening: bool) -> None:
    connections = Connections(listening)
    connections.opening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections.shut()
        server.setblocking(False)
        with pytest.raises(OSError) as caught:
            server.accept()
        assert isinstance(caught.value, BlockingIOError) is not listening


def test_a_repeated_rendezvous_forgets_no_connection(connect: Callable[[], Pair]) -> None:
    """A function calls `hvd.init()` in each of its runs."""
    connections = Connections()
    own = open_one(connections, connect)
    connections.opening()
    connections.opened()
    connections.opening()
    second = connect()
    connections.shut()
    assert is_shut(own) and is_shut(second), "also during a rendezvous"


def test_forgotten_connections_stay_open(connect: Callable[[], Pair]) -> None:
    connections = Connections()
    own = open_one(connections, connect)
    connections.forget()
    connections.shut()
    assert not is_shut(own)


# -- gloo's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("during", [False, True], ids=["after", "during the forming"])
def test_connections_to_a_listener_of_the_group_receive_nothing_more(connect: Callable[[], Pair], during: bool) -> None:
    gloo = GlooConnections()
    with ExitStack() as stack:
        with gloo.forming():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            peer = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
            accepted = stack.enter_context(listener.accept()[0])
            other = connect()
            if during:
                gloo.shut()
        assert gloo.own == [listener.getsockname()]
        gloo.shut()
        assert received_end(accepted) and not received_end(peer) and not is_shut(other)
        stack.enter_context(
            socket.create_connection(listener.getsockname(), timeout=5)
        )  # the listening socket is still open


def test_connections_to_a_peer_and_to_the_store_receive_nothing_more(connect: Callable[[], Pair]) -> None:
    gloo = GlooConnections()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        own = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
        accepted = stack.enter_context(listener.accept()[0])
        other = connect()
        gloo.add_remote([("::ffff:127.0.0.1", listener.getsockname()[1])])
        gloo.shut()
        assert received_end(own) and not received_end(accepted) and not is_shut(other)
    gloo.forget()
    assert gloo.own == []


def test_what_a_peer_has_asked_for_can_be_sent_until_the_group_has_ended() -> None:
    """Also when gloo has closed its end of the connection."""
    gloo = GlooConnections()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname(), timeout=5)
        peer = listener.accept()[0]
        with peer:
            gloo.add_remote([listener.getsockname()])
            gloo.hold()
            peer.sendall(b"send me this")
            gloo.shut()
            own.sendall(b"this")
            assert peer.recv(4) == b"this"
            own.close()  # with unread data, after which the kernel would refuse what the peer sends
            for _ in range(3):
                peer.sendall(b"more")
            assert not received_end(peer)
            gloo.end()
            assert received_end(peer)
            peer.sendall(b"more")
            gloo.forget()
            with pytest.raises(OSError):
                for _ in range(100):
                    peer.sendall(b"more")

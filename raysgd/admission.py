"""Let in the clients that show a token, and no others."""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import time
from collections import OrderedDict

__all__ = ["TOKEN_BYTES", "Admission"]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKEN_S = 5.0
AT_MOST = 64
EXHAUSTED_S = 0.1


class Admission:
    """Owns a listening socket and the connections that have not shown the token yet: at most 64 of them, each for at most
    5 s. It reads the token and nothing else, and serves all of them at once. It never reads what comes after the token."""

    def __init__(self, host: str) -> None:
        self._listener = _listen(host)
        self._listener.setblocking(False)
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waiting: OrderedDict[socket.socket, tuple[bytearray, float]] = OrderedDict()  # the oldest first

    def admitted(self, timeout: float) -> list[socket.socket]:
        """Wait for at most `timeout` seconds. Return the connections, in blocking mode, that have shown the token."""
        found = []
        for key, _ in self._selector.select(timeout):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection in self._waiting and self._shows_token(connection):
                found.append(connection)
        self._drop_late()
        return found

    def close(self) -> None:
        self._selector.close()
        for connection in (self._listener, *self._waiting):
            connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left, or the client is gone already
            logger.debug("a connection could not be accepted: %s", error)
            if not self._drop_oldest():
                time.sleep(EXHAUSTED_S)
            return
        if len(self._waiting) >= AT_MOST:
            self._drop_oldest()
        connection.setblocking(False)
        self._waiting[connection] = bytearray(), time.monotonic() + TOKEN_S
        self._selector.register(connection, selectors.EVENT_READ)

    def _shows_token(self, connection: socket.socket) -> bool:
        """Read what is there of the token. A client that leaves, or shows another one, is dropped."""
        shown, _ = self._waiting[connection]
        try:
            data = connection.recv(TOKEN_BYTES - len(shown))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        shown += data
        if data and len(shown) < TOKEN_BYTES:
            return False
        if not hmac.compare_digest(shown, self.token.encode()):
            self._drop(connection)
            return False
        self._forget(connection)
        connection.setblocking(True)
        return True

    def _drop_late(self) -> None:
        now = time.monotonic()
        while self._waiting and next(iter(self._waiting.values()))[1] < now:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        if not self._waiting:
            return False
        self._drop(next(iter(self._waiting)))
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError:  # the address that others know this machine by is not one of its own (NAT)
        return socket.create_server(("", 0))

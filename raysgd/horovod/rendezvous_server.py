"""Horovod's rendezvous server on the driver, where ranks publish their addresses. Driver.

It imports Horovod.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

from horovod.runner.http.http_server import OK, RendezvousHandler, RendezvousHTTPServer

from raysgd.core.channel.network import LOOPBACK, listen
from raysgd.environment import control_ports

logger = logging.getLogger("raysgd")

FORBIDDEN, GONE = 403, 410
SECRET_BYTES = 16
LOOK_S = 0.1  # how often the server's thread looks whether it is to end


class Handler(RendezvousHandler):  # type: ignore[misc]
    """Serves one request as Horovod's handler does, except for the methods below."""

    def parse_request(self) -> bool:
        """Refuse clients of another generation, whose server may have had the same port, and
        strangers: the path must begin with the secret of this one."""
        if not super().parse_request():
            return False
        # Horovod's client appends ":PORT" to the secret, which it takes for the end of the address.
        secret, _, path = self.path.lstrip("/").partition("/")
        if not hmac.compare_digest(secret.partition(":")[0].encode(), self.server.secret.encode()):
            self.send_status_code(FORBIDDEN)
            return False
        self.path: str = f"/{path}"
        return True

    def do_GET(self) -> None:
        """End the wait of a rank in `hvd.init()` when its generation has ended. Horovod's clients
        ask again after 404 until their time limit, and after no other status."""
        if self.server.ended in self.server.cache:
            self.send_status_code(GONE)
        else:
            super().do_GET()

    def do_DELETE(self) -> None:
        """Remove a scope's addresses when all its ranks have connected. Horovod's own method then
        forgets which ranks of the other scopes have, and keeps their old addresses for the next
        `hvd.init()`."""
        scope, _, key = self.path.strip("/").partition("/")
        if scope not in self.server.scope_size:
            super().do_DELETE()
            return
        with self.server.finished_list_lock, self.server.cache_lock:
            finished = self.server.finished_list[scope]
            finished.append(key)
            if len(set(finished)) == self.server.scope_size[scope]:
                finished.clear()
                self.server.cache.pop(scope, None)
        self.send_status_code(OK)


class RendezvousServer(RendezvousHTTPServer):  # type: ignore[misc]
    """Owns one port, one thread, and the addresses of one generation. It listens on the driver's
    node address only, at a port that the user allows. `sizes` has the number of ranks of each of
    Horovod's scopes; an entry in the scope `ended` ends the generation."""

    daemon_threads = True  # a client that sends nothing does not delay `close`

    def __init__(self, host: str, sizes: Mapping[str, int], *, ended: str) -> None:
        super().__init__((host, 0), Handler, verbose=0)
        self.scope_size, self.ended = dict(sizes), ended
        self.secret = secrets.token_hex(SECRET_BYTES)
        self.port = int(self.socket.getsockname()[1])
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_S,), name="raysgd-horovod-rendezvous", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        host = self.server_address[0]
        self.socket.close()
        self.socket: socket.socket = listen(
            "Horovod's rendezvous server", host, None if host == LOOPBACK else control_ports()
        )

    def server_activate(self) -> None:
        """Do nothing, because the socket listens already."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an invalid request, which Python would print."""
        logger.debug("a request to Horovod's rendezvous server failed", exc_info=True)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=5)

"""The HTTP server on the driver, where Horovod's ranks publish their addresses. Driver."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
from collections.abc import Mapping
from http import HTTPStatus

from raysgd.core.network import LOOPBACK, listen
from raysgd.environment import control_ports

logger = logging.getLogger("raysgd")

ENDED = "raysgd-over"
OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, TOO_LARGE, GONE = 200, 400, 403, 404, 413, 410
SECRET_BYTES = 16
HEAD_BYTES = 4096
BODY_BYTES, BODY_BYTES_PER_RANK = 1 << 16, 1 << 10
REQUEST_S = 5.0
OPEN_AT_MOST, OPEN_PER_RANK = 256, 4  # all ranks can connect at the same moment


class RendezvousServer:
    """Owns one port, one thread, and the entries of one generation. It speaks the protocol of
    Horovod's own rendezvous server, which listens on all addresses, asks for no secret, and stores
    without limit what anyone sends.

    Every path begins with the secret of the generation, which is checked before anything is read or
    stored. A request has 5 seconds, whatever the client sends. If more than 256 connections are
    open, or four for each rank if that is more, the oldest one is closed. `sizes` says how many
    ranks must finish with each scope before its entries are removed.
    """

    def __init__(self, host: str, sizes: Mapping[str, int]) -> None:
        self.secret = secrets.token_hex(SECRET_BYTES)
        self._sizes = dict(sizes)
        ranks = max(self._sizes.values(), default=1)
        self._body_bytes = BODY_BYTES + BODY_BYTES_PER_RANK * ranks
        self._open_at_most = max(OPEN_AT_MOST, OPEN_PER_RANK * ranks)
        self._entries: dict[str, dict[str, bytes]] = {}
        self._finished: dict[str, set[str]] = {}
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._listener = listen("Horovod's rendezvous server", host, None if host == LOOPBACK else control_ports())
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._closed = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="raysgd-horovod-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set_result, None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_until_closed())
        finally:
            self._loop.close()

    async def _serve_until_closed(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=HEAD_BYTES)
        await self._closed
        server.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > self._open_at_most:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            await asyncio.wait_for(self._exchange(reader, writer), REQUEST_S)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            logger.debug("refused a connection to Horovod's rendezvous server: %r", error)
        except asyncio.CancelledError:  # the server closes; asyncio, before Python 3.12, would log it as an error
            logger.debug("closed an open connection to Horovod's rendezvous server")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, content = await self._request(reader)
        line = f"HTTP/1.0 {status} {HTTPStatus(status).phrase}"
        writer.write(f"{line}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Serve one request. Only its head is read before the secret is checked."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = head[0].partition(" ")
        parts = rest.partition(" ")[0].split("/")
        # Horovod's client appends ":PORT" to the secret, which it takes for the end of the address.
        if len(parts) != 4 or not hmac.compare_digest(parts[1].partition(":")[0].encode(), self.secret.encode()):
            return FORBIDDEN, b""
        _, _, scope, key = parts
        if (length := _length(head)) is None or method not in ("GET", "PUT", "DELETE"):
            return BAD_REQUEST, b""
        if length > self._body_bytes:
            return TOO_LARGE, b""
        content = await reader.readexactly(length)
        if method == "GET":
            return self._get(scope, key)
        if method == "PUT":
            self._entries.setdefault(scope, {})[key] = content
            return OK, b""
        self._finish(scope, key)
        return OK, b""

    def _get(self, scope: str, key: str) -> tuple[int, bytes]:
        if ENDED in self._entries:
            return GONE, b""
        content = self._entries.get(scope, {}).get(key)
        return (NOT_FOUND, b"") if content is None else (OK, content)

    def _finish(self, scope: str, key: str) -> None:
        """Note that a rank is connected to all others of this scope. When all ranks are, remove its
        entries, so that the next `hvd.init()` can begin. Of a scope that Horovod created later, for
        a set of processes, remove only the rank's own entry."""
        if scope not in self._sizes:
            self._entries.get(scope, {}).pop(key, None)
            return
        finished = self._finished.setdefault(scope, set())
        finished.add(key)
        if len(finished) == self._sizes[scope]:
            self._entries.pop(scope, None)
            finished.clear()


def _length(head: list[str]) -> int | None:
    fields = [line.partition(":") for line in head[1:]]
    text = next((value.strip() for name, _, value in fields if name.strip().lower() == "content-length"), "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None

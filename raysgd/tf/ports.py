"""A port for TensorFlow's server, taken before the server starts: every rank's address must be known by then. Worker.

Standard library only, because training functions use it before TensorFlow is imported.
"""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["HeldPort", "NoFreePortError"]

PORTS = (15000, 32000)
TRIES = 100


class NoFreePortError(OSError):
    """No port is free, or the driver's host cannot be reached from here."""


class HeldPort:
    """Owns a port that a server of this process can take after `release`.

    TensorFlow's server takes a number, not an open socket. So the port is held until the server starts, because other
    workers choose ports at the same time. It is below the range that systems use for outgoing connections. Nothing listens
    on it.
    """

    def __init__(self) -> None:
        for _ in range(TRIES):
            self._held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):
                self._held.bind(("", random.SystemRandom().randrange(*PORTS)))
                self.number: int = self._held.getsockname()[1]
                return
            self._held.close()
        raise NoFreePortError(f"no free port was found between {PORTS[0]} and {PORTS[1]}")

    def address_towards(self, host: str) -> str:
        """Return this machine's address, as `host` reaches it, with the port."""
        try:
            family, _, _, _, there = socket.getaddrinfo(host, self.number, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # sends nothing
                own = str(probe.getsockname()[0])
        except OSError as error:
            self.release()
            raise NoFreePortError(f"this machine has no address towards {host}: {error}") from error
        return f"[{own}]:{self.number}" if ":" in own else f"{own}:{self.number}"

    def release(self) -> None:
        self._held.close()

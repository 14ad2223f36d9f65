"""Attack the ports that saves use, with clients without the key, from a separate process on this machine.

It watches the listening ports of a driver's process, and attacks each one that is not among the given ones, which are
Ray's. Run it as `python save_ports.py PID KIND PORTS`; it says "ready" on its standard output, ends when its standard
input ends, and prints how many connections it has made."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Address = tuple[str, int]
LISTEN = "0A"
AT_MOST = 2000
PER_PORT = 400


@dataclass
class Attack:
    """What the attackers did. Complete when they have ended."""

    connections: int = 0


@contextlib.contextmanager
def attacked(kind: str, spared: set[Address]) -> Iterator[Attack]:
    """Attack each listening port of this process during the block, except for the spared ones."""
    attack = Attack()
    command = [sys.executable, __file__, str(os.getpid()), kind, json.dumps(sorted(spared))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield attack
        process.stdin.close()
        attack.connections = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def listening(pid: int) -> set[Address]:
    """Return the addresses on which a process listens, as the kernel reports them."""
    ports: dict[str, Address] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
            for line in list(lines)[1:]:
                part = line.split()
                if part[3] == LISTEN:
                    host, _, port = part[1].partition(":")
                    ports[part[9]] = (own_address(host), int(port, 16))
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]")
            if inode in ports:
                found.add(ports[inode])
    return found


def own_address(host: str) -> str:
    """Return an address of this machine from the kernel's notation: the loopback address for "all interfaces"."""
    if len(host) == 8 and int(host, 16):
        return socket.inet_ntoa(struct.pack("=I", int(host, 16)))
    return "127.0.0.1"


# -- what one connection does: a generator that yields for how many seconds it waits ----------------------


Steps = Iterator[float]


def leave(connection: socket.socket) -> Steps:
    """Connect, and disconnect at once."""
    yield from ()


def linger(connection: socket.socket) -> Steps:
    """Connect, and disconnect some time later."""
    yield 0.7


def reset(connection: socket.socket) -> Steps:
    yield 0.1
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(connection: socket.socket) -> Steps:
    while True:
        yield 60.0


def drip(connection: socket.socket) -> Steps:
    """Send one byte per second."""
    while True:
        connection.sendall(b"a")
        yield 1.0


def random_bytes(connection: socket.socket) -> Steps:
    connection.sendall(os.urandom(5000))
    yield 1.0


def wrong_proof(connection: socket.socket) -> Steps:
    """Send what a worker sends, after a wrong proof."""
    connection.sendall(bytes(64) + struct.pack(">IQQ", 4, 0, 0) + bytes(32) + b"evil")
    yield 1.0


def half_proof(connection: socket.socket) -> Steps:
    connection.sendall(bytes(32))
    yield 0.5


def flood(connection: socket.socket) -> Steps:
    """Send as much as the other end accepts."""
    connection.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            connection.send(b"f" * 65536)
        yield 0.01


KINDS: dict[str, tuple[int, Callable[[socket.socket], Steps]]] = {
    "leave": (1, leave),
    "linger": (3, linger),
    "reset": (3, reset),
    "silent-1": (1, silent),
    "silent-3": (3, silent),
    "silent-300": (300, silent),
    "drip": (3, drip),
    "random": (3, random_bytes),
    "wrong-proof": (3, wrong_proof),
    "half-proof": (3, half_proof),
    "flood": (3, flood),
}


class Attacker:
    """Keeps `count` connections of one kind at each port."""

    def __init__(self, pid: int, kind: str, spared: set[Address]) -> None:
        self._pid, self._spared = pid, spared
        self._count, self._behave = KINDS[kind]
        self._open: dict[Address, list[tuple[socket.socket, Steps, float]]] = {}
        self._made: dict[Address, int] = {}
        self.connections = 0

    def step(self) -> None:
        fresh = listening(self._pid) - self._spared
        for port in fresh:
            while len(self._open.get(port, ())) < self._count and self._may_connect(port):
                if not self._connect(port):
                    break
        self._open = {
            port: [entry for each in held if (entry := self._go_on(each))] for port, held in self._open.items()
        }

    def _may_connect(self, port: Address) -> bool:
        return self.connections < AT_MOST and self._made.get(port, 0) < PER_PORT

    def _connect(self, port: Address) -> bool:
        try:
            connection = socket.create_connection(port, timeout=1)
        except OSError:
            return False
        self.connections += 1
        self._made[port] = self._made.get(port, 0) + 1
        self._open.setdefault(port, []).append((connection, self._behave(connection), 0.0))
        return True

    @staticmethod
    def _go_on(entry: tuple[socket.socket, Steps, float]) -> tuple[socket.socket, Steps, float] | None:
        connection, steps, at = entry
        now = time.monotonic()
        if now < at:
            return entry
        try:
            return connection, steps, now + next(steps)
        except (StopIteration, OSError):
            connection.close()
            return None


def main() -> None:
    attacker = Attacker(int(sys.argv[1]), sys.argv[2], {(host, port) for host, port in json.loads(sys.argv[3])})
    ended = selectors.DefaultSelector()
    ended.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while not ended.select(timeout=0.002):
        with contextlib.suppress(FileNotFoundError):  # the process has ended
            attacker.step()
    print(attacker.connections, flush=True)


if __name__ == "__main__":
    main()

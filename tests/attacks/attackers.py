"""Attack every port on which given processes listen, with clients without the key, in a separate process.

    with Storm(folder, ["http", "silent-300"]) as storm:
        trainer.train()
    storm.report.tried   # connections

The folder has one file for each process to attack, named after its id, with the ports on which it listened before the
library opened any. Those belong to Ray and are not attacked. Ports that appear during the storm (of a save, of a new
generation, of a new process) are attacked within milliseconds. Needs Linux (/proc and netlink), and only the standard
library."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ATTACKS", "Report", "Storm", "listening", "note_ports"]

SIZES = struct.Struct(">QQ")
# A number and a proof, which is wrong. Not zeros: gloo would take them for the number of a rank's first connection, and a group
# that is being formed would fail to, and be formed again (docs/security.md says that gloo admits strangers).
PROOF = b"n" * 64
LOOK_S = 0.003
CONNECT_S = 5.0
PUSHED_AT_MOST = 64 << 20


class Creates:
    """Unpickling it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def framed(message: bytes) -> bytes:
    """Return a message in the format of the control channel."""
    return SIZES.pack(len(message), 0) + message


@dataclass(frozen=True)
class Aim:
    """What an attacker knows: an address, and the file that a pickle of its would create."""

    host: str
    port: int
    marker: str = "/dev/null"


Payload = Callable[[Aim], bytes]

# Each is sent at once, and the connection is left open.
PAYLOADS: dict[str, Payload] = {
    "random": lambda aim: random.Random(aim.port).randbytes(5000),
    "http": lambda aim: b"GET / HTTP/1.1\r\nHost: example\r\nContent-Length: 5\r\n\r\nhello",
    "http-put": lambda aim: b"PUT /global/0 HTTP/1.1\r\nHost: example\r\nContent-Length: 3\r\n\r\nabc",
    "pickle": lambda aim: pickle.dumps(Creates(aim.marker)),
    "pickle-framed": lambda aim: struct.pack(">Q", len(evil := pickle.dumps(Creates(aim.marker)))) + evil,
    "wrong-key": lambda aim: PROOF + framed(pickle.dumps(Creates(aim.marker))),
    "huge-length": lambda aim: PROOF + SIZES.pack(2**64 - 1, 2**64 - 1) + b"{}",
    "huge-length-native": lambda aim: struct.pack("<Q", 2**62) + b"x" * 100,
    "half-proof": lambda aim: PROOF[:-1],
}


class Client:
    """One attack on one address. Owns its connections until `close`."""

    def __init__(self, aim: Aim, stop: threading.Event) -> None:
        self.aim, self.stop = aim, stop
        self.opened: list[socket.socket] = []
        self.tried = self.unreachable = self.pushed = 0

    def connect(self) -> socket.socket | None:
        self.tried += 1
        try:
            connection = socket.create_connection((self.aim.host, self.aim.port), timeout=CONNECT_S)
        except OSError:
            self.unreachable += 1
            return None
        self.opened.append(connection)
        return connection

    def send(self, data: bytes) -> None:
        connection = self.connect()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(data)

    def silent(self, count: int) -> None:
        for _ in range(count):
            if self.stop.is_set() or self.unreachable > 3:
                return
            self.connect()

    def reflect(self) -> None:
        """Send back what the other end says first, for as long as it says something."""
        connection = self.connect()
        with contextlib.suppress(OSError):
            while connection is not None and not self.stop.is_set() and (said := connection.recv(1 << 16)):
                connection.sendall(said + PROOF)

    def drip(self) -> None:
        """Send one byte per second of something that could become a message."""
        connection = self.connect()
        for byte in PROOF + framed(b"x"):
            if connection is None or self.stop.wait(1.0):
                return
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return

    def reset(self, data: bytes) -> None:
        connection = self.connect()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    def knock(self) -> None:
        """Connect and disconnect, a few times."""
        for _ in range(5):
            connection = self.connect()
            if connection is not None:
                connection.close()

    def push(self, count: int) -> None:
        """Open many connections that each send as much as the other end accepts."""
        self.silent(count)
        block = memoryview(b"f" * (1 << 16))
        for connection in self.opened:
            connection.setblocking(False)
        alive = list(self.opened)
        while alive and not self.stop.is_set() and self.pushed < PUSHED_AT_MOST:
            for connection in list(alive):
                try:
                    self.pushed += connection.send(block)
                except BlockingIOError:
                    continue
                except OSError:
                    alive.remove(connection)
            time.sleep(0.2)

    def close(self) -> None:
        for connection in self.opened:
            connection.close()


def _sends(payload: Payload) -> Callable[[Client], None]:
    return lambda client: client.send(payload(client.aim))


ATTACKS: dict[str, Callable[[Client], None]] = {
    **{name: _sends(payload) for name, payload in PAYLOADS.items()},
    "silent-1": lambda client: client.silent(1),
    "silent-300": lambda client: client.silent(300),
    "reflect": Client.reflect,
    "drip": Client.drip,
    "reset": lambda client: client.reset(b""),
    "knock": Client.knock,
    "push-300": lambda client: client.push(300),
}


# -- which ports ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    host: str
    port: int
    pid: int
    inode: str


# Formats and not Structs, because `note_ports` is pickled by value.
DIAG_REQUEST = "=IHHIIBBBxI48x"  # a netlink header and inet_diag_req_v2
DIAG_ANSWER = "=BBBB2s2s16s16s28xI"  # inet_diag_msg: ports and addresses are in network order
NETLINK_HEADER = "=IHHII"
SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, NLMSG_DONE, LISTEN = 20, 0x301, 3, 10


def _sockets_in_state_listen() -> dict[str, tuple[str, int]]:
    """Return the address by inode, of all processes on this machine. It comes directly from the kernel, because
    /proc/net/tcp also lists all connections that the attacks have opened."""
    found: dict[str, tuple[str, int]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # 4: NETLINK_SOCK_DIAG
            header = (struct.calcsize(DIAG_REQUEST), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0)
            kernel.send(struct.pack(DIAG_REQUEST, *header, family, socket.IPPROTO_TCP, 0, 1 << LISTEN))
            while _take_answers(kernel.recv(1 << 16), family, found):
                continue
    return found


def _take_answers(data: bytes, family: int, found: dict[str, tuple[str, int]]) -> bool:
    """Return whether more answers follow."""
    while data:
        length, kind, *_ = struct.unpack_from(NETLINK_HEADER, data)
        if kind != SOCK_DIAG_BY_FAMILY:
            assert kind == NLMSG_DONE, "the kernel does not list sockets"
            return False
        *_, port, _, address, _, inode = struct.unpack_from(DIAG_ANSWER, data, struct.calcsize(NETLINK_HEADER))
        host = socket.inet_ntop(family, address[: 4 if family == socket.AF_INET else 16])
        found[str(inode)] = ("" if host in ("0.0.0.0", "::") else host, int.from_bytes(port, "big"))
        data = data[(length + 3) & ~3 :]
    return True


def listening(pids: Iterable[int]) -> list[Listener]:
    """Return the TCP ports on which these processes listen. A host of "" means all addresses."""
    sockets = _sockets_in_state_listen()
    return [each for pid in pids for each in _of_process(pid, sockets)]


def _of_process(pid: int, sockets: dict[str, tuple[str, int]]) -> list[Listener]:
    found = []
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(descriptor.path)
                inode = name[8:-1] if name.startswith("socket:[") else ""
                if inode in sockets:
                    found.append(Listener(*sockets[inode], pid, inode))
    return found


def note_ports(folder: str) -> None:
    """Note the open ports of a process that will be attacked, before the library opens its own."""
    path = Path(folder) / str(os.getpid())
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps([each.inode for each in listening([os.getpid()])]), encoding="ascii")
    draft.rename(path)


# -- the storm ------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Counts of one storm. `ports` are those that were attacked, as [process id, host, port]."""

    tried: int = 0
    unreachable: int = 0
    pushed: int = 0
    ports: list[tuple[int, str, int]] = field(default_factory=list)


class Storm:
    """Runs attacks in a separate process during the block."""

    def __init__(self, folder: Path, names: Iterable[str], *, host: str) -> None:
        self._folder = folder
        setting = {"folder": str(folder), "names": list(names), "host": host}
        self._command = [sys.executable, __file__, json.dumps(setting)]
        self.report = Report()

    def __enter__(self) -> Storm:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate(timeout=240)  # it ends when its input ends
        self.report = Report(**json.loads(output))


class _Watcher:
    """Finds ports, and starts each attack once on each of them."""

    def __init__(self, folder: str, names: list[str], host: str) -> None:
        self._folder, self._names = Path(folder), names
        self._hosts = dict.fromkeys(["127.0.0.1", host])
        self._aim = functools.partial(Aim, marker=str(self._folder / "executed"))
        self._stop = threading.Event()
        self._seen: set[str] = set()
        self._clients: list[Client] = []
        self._threads: list[threading.Thread] = []
        self.report = Report()

    def look(self) -> None:
        sockets = _sockets_in_state_listen()
        for name in os.listdir(self._folder):
            if name.isdecimal() and sockets.keys() - self._seen:
                self._look_at(int(name), {inode: sockets[inode] for inode in sockets.keys() - self._seen})
        self._seen |= sockets.keys()

    def _look_at(self, pid: int, fresh: dict[str, tuple[str, int]]) -> None:
        theirs = set(json.loads((self._folder / str(pid)).read_text(encoding="ascii")))
        for listener in _of_process(pid, fresh):
            if listener.inode not in theirs:
                self.report.ports.append((pid, listener.host, listener.port))
                for host in self._hosts if listener.host == "" else [listener.host]:
                    self._attack(host, listener.port)

    def _attack(self, host: str, port: int) -> None:
        for name in self._names:
            client = Client(self._aim(host, port), self._stop)
            self._clients.append(client)
            thread = threading.Thread(target=ATTACKS[name], args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> Report:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * CONNECT_S)
        for client in self._clients:
            self.report.tried += client.tried
            self.report.unreachable += client.unreachable
            self.report.pushed += client.pushed
            client.close()
        return self.report


def main() -> None:
    watcher = _Watcher(**json.loads(sys.argv[1]))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    watcher.look()
    print("begun", flush=True)
    while not over.wait(LOOK_S):
        watcher.look()
    print(json.dumps(asdict(watcher.end())), flush=True)


if __name__ == "__main__":
    main()

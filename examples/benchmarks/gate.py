"""Turns: programs that stay up, and each do an epoch when the benchmark says so.

Every rank of a program connects to the benchmark, says which process it is, and waits at its gate. One byte
opens it; with the next one it says that the epoch is done, and waits there again. What a framework does
around an epoch lies between two visits at the gate, so it is all within the time that is taken.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping

from processes import HERE, Peer, child

START_S = 180.0
EPOCH_S = 900.0
LOOK_S = 0.5


class Gate:
    """A rank's side. `while gate.wait(): ...` does an epoch for each turn, until there are no more."""

    def __init__(self, address: str = "") -> None:
        host, port = (address or os.environ["GATE"]).rsplit(":", 1)
        self._line = socket.create_connection((host, int(port)))
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line.sendall(f"{os.getpid()}\n".encode())

    def wait(self) -> bool:
        """What was asked for is done. Blocks until more is; False: it was the last."""
        try:
            self._line.sendall(b"d")
            return self._line.recv(1) == b"g"
        except OSError:  # the benchmark has ended
            return False


class Program:
    """A contender that is a program of its own, started now; its ranks are met at the first epoch. With `stopped`, its
    processes are stopped between epochs, because they use the processors even when they have nothing to do."""

    def __init__(
        self, name: str, command: list[str], extra: Mapping[str, str], ranks: int, *, stopped: bool = False
    ) -> None:
        self.name, self._ranks, self._stopped = name, ranks, stopped
        self._lines: list[socket.socket] = []
        self._processes: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = contextlib.ExitStack()
        self._program: subprocess.Popen[str] = self._open.enter_context(child(command, {**extra, "GATE": address}))

    @classmethod
    def of(cls, peer: Peer, extra: Mapping[str, str], ranks: int, script: str = "") -> "Program":
        """A peer's script in peers/."""
        command = peer.command(HERE / "peers" / (script or peer.script), ranks)
        stopped = peer.launcher == "horovodrun"  # its threads poll every millisecond
        return cls(peer.name, command, extra, ranks, stopped=stopped)

    def epoch(self) -> None:
        if not self._lines:
            self.meet()
        self._signal(signal.SIGCONT)
        for line in self._lines:
            line.sendall(b"g")
        self._wait_for_all(EPOCH_S)
        self._signal(signal.SIGSTOP)

    def processes(self) -> list[int]:
        return self._processes

    def stop(self) -> None:
        """The ranks see their gate's end; one that does not leave by that is killed with the program's session."""
        self._signal(signal.SIGCONT)
        for line in [*self._lines, self._listener]:
            line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(timeout=5.0)
        self._open.close()

    def _signal(self, number: int) -> None:
        for process in self._processes if self._stopped else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def meet(self) -> None:
        """Waits until all ranks stand at the gate."""
        self._listener.settimeout(LOOK_S)
        waited = 0.0
        while len(self._lines) < self._ranks:
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                waited += LOOK_S
                if waited > START_S or self._program.poll() is not None:
                    raise self._trouble(f"{len(self._lines)} of {self._ranks} ranks came to the gate") from None
                continue
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._processes.append(int(self._number(line)))
            self._lines.append(line)
        self._wait_for_all(START_S)

    def _number(self, line: socket.socket) -> str:
        line.settimeout(START_S)
        text = ""
        while not text.endswith("\n"):
            text += self._said(line)
        return text

    def _wait_for_all(self, limit_s: float) -> None:
        for line in self._lines:
            line.settimeout(limit_s)
            self._said(line)

    def _said(self, line: socket.socket) -> str:
        try:
            said = line.recv(1).decode()
        except OSError as error:
            raise self._trouble(f"a rank did not answer: {error}") from error
        if not said:
            raise self._trouble("a rank left in the middle")
        return said

    def _trouble(self, what: str) -> RuntimeError:
        status = self._program.poll()
        ended = "the program still runs" if status is None else f"the program ended with status {status}"
        return RuntimeError(f"{self.name}: {what}; {ended}; set BENCHMARK_DEBUG=1 to see its messages")

"""Check whether processes of this machine have ended, and end them. Driver."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence


class LocalProcess:
    """A process of this machine. Owns a handle that outlives its id, if the system has such."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1
        self._ended = False
        if hasattr(os, "pidfd_open"):
            try:
                self._handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = True
            except OSError:  # a kernel without it
                self._handle = -1

    @property
    def ended(self) -> bool:
        if not self._ended and (self._readable() if self._handle >= 0 else not self._exists()):
            self._ended = True
            self.close()
        return self._ended

    def kill(self) -> None:
        if self.ended:
            return
        try:
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._ended = True

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _readable(self) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def _exists(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def end_all(processes: Sequence[LocalProcess], *, patience_s: float) -> list[LocalProcess]:
    """Wait until all have ended. Kill those that have not after `patience_s`, and return them."""
    killed: list[LocalProcess] = []
    try:
        _wait(processes, patience_s)
    finally:  # also after Ctrl-C
        for process in processes:
            if not process.ended:
                process.kill()
                killed.append(process)
        _wait(killed, patience_s)
        for process in processes:
            process.close()
    return killed


def _wait(processes: Sequence[LocalProcess], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not all(process.ended for process in processes):
        time.sleep(0.01)

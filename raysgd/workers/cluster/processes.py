"""Check whether processes of this machine have ended, and end them. Driver."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Sequence

# Linux from 6.15 on tells how a process has ended that is not a child of this one: <linux/pidfd.h>.
PIDFD_GET_INFO, PIDFD_INFO_EXIT, INFO_BYTES, STATUS_AT = 0xC040FF0B, 8, 64, 60
LAST_STEPS_MS = 100  # between the end of a process's connections and its own


class LocalProcess:
    """A process of this machine. Owns a handle that outlives its id, if the system has such."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1
        self._ended, self._how = False, ""
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
            self._how = self._read_how()
            self.close()
        return self._ended

    def how_it_ended(self) -> str:
        """How the process, which is ending, has ended: "was ended by SIGKILL" or "ended with exit
        code 1"; "" if the system does not tell."""
        if self._handle >= 0:
            self._readable(LAST_STEPS_MS)
        return self._how if self.ended else ""

    def _read_how(self) -> str:
        if self._handle < 0:
            return ""
        info = bytearray(INFO_BYTES)
        struct.pack_into("Q", info, 0, PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._handle, PIDFD_GET_INFO, info)
        except OSError:  # an older kernel
            return ""
        if not struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
            return ""
        code = os.waitstatus_to_exitcode(struct.unpack_from("i", info, STATUS_AT)[0])
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"

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

    def _readable(self, limit_ms: int = 0) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(limit_ms))

    def _exists(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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

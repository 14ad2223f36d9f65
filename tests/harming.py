"""What can go wrong in one process, done on purpose to the process that calls it, or to another one.

    segfault     it reads address 0
    abort        it calls abort(), as native code does when a check fails
    exit         it ends without a word
    memory       the kernel kills it because it exceeds a memory limit, which is its own: a control group that holds only it
    gil          it holds Python's interpreter lock in native code
    exception    another thread raises an exception at wherever its main thread is (PyThreadState_SetAsyncExc)
    half-open    what arrives on its connections is dropped, so nothing is acknowledged; nothing is closed either
    collective   its connections to the other ranks end, although all ranks live
    ecc          its GPU, which it need not have, raises this error from now on
    assert       the same with an error that a kernel of the user's can have caused

A kernel out-of-memory kill needs a control group that this process may create (version 1 or 2). Elsewhere there is no
substitute: a limit on the address space (RLIMIT_AS) raises a MemoryError, which is the user's error, and a high
`oom_score_adj` only chooses the victim of a machine without memory. So `memory` raises an OSError there.
"""

import _thread
import contextlib
import ctypes
import gc
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

BACKENDS = {"TorchBackend", "TorchFunctionBackend", "HorovodBackend", "HorovodFunctionBackend"}
GROUP = "raysgd-fault"
MEMORY = 48 << 20
SO_ATTACH_FILTER = 26
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of a socket filter: accept no byte


class Injected(Exception):
    """What `exception` raises."""


def harm(kind: str, seconds: float = 0.0) -> None:
    """Do this to the calling process. `seconds` is how long it holds the lock."""
    if kind == "gil":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        HARMS[kind]()


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def break_gpu(text: str) -> None:
    import torch

    from raysgd.workers import gpu_faults

    def error() -> Exception:
        return torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported")

    gpu_faults.probe, gpu_faults.gpu_uuid = error, lambda: "GPU-5f1c"
    raise error()


def exceed_memory() -> None:
    """Enter a group with a limit above what this process has, and need more."""
    group = Path(_memory_groups(), f"{GROUP}-{secrets.token_hex(6)}")  # process ids are repeated in other namespaces
    group.mkdir()
    limit = group / "memory.max"
    (limit if limit.exists() else group / "memory.limit_in_bytes").write_text(str(MEMORY))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(bytearray(b"x" * (1 << 20)))


def forget_memory_limits() -> None:
    """Remove the groups of the processes that were killed."""
    for group in _memory_groups().glob(f"{GROUP}-*"):
        with contextlib.suppress(OSError):  # it is another run's, and in use
            group.rmdir()


def why_no_memory_limit() -> str:
    """Why the kernel cannot be made to kill one process, "" if it can."""
    group = Path(_memory_groups(), f"{GROUP}-{secrets.token_hex(6)}")
    try:
        group.mkdir()
    except OSError as error:
        return f"no memory limit for one process: {error}"
    try:
        limits = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
        return "" if any(map(Path.exists, limits)) else f"{group.parent} does not limit memory"
    finally:
        group.rmdir()


def _memory_groups() -> Path:
    """The folder of this process's control group for memory."""
    unified = "/"
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            # A group in which a fault is being tried is not the place for another one.
            return Path(f"/sys/fs/cgroup/memory{path}".split(f"/{GROUP}-")[0])
        if number == "0":
            unified = path
    return Path(f"/sys/fs/cgroup{unified}".split(f"/{GROUP}-")[0])


def interrupt_main() -> None:
    """Raise `Injected` in the main thread soon, wherever it is then."""
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)

    def raise_there() -> None:
        time.sleep(0.005)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Injected))

    _thread.start_new_thread(raise_there, ())  # a Thread could be interrupted while it is started


def drop_all() -> None:
    code = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _connections() -> Iterator[socket.socket]:
    """Copies of this process's TCP connections."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                found.getpeername()  # raises an OSError for a socket that listens
                yield found


def break_collectives() -> None:
    for backend in [each for each in gc.get_objects() if type(each).__name__ in BACKENDS]:
        backend.abort()


HARMS: dict[str, Callable[[], None]] = {
    "segfault": segfault,
    "abort": os.abort,
    "exit": leave,
    "memory": exceed_memory,
    "exception": interrupt_main,
    "half-open": drop_all,
    "collective": break_collectives,
    "ecc": partial(break_gpu, "uncorrectable ECC error encountered"),
    "assert": partial(break_gpu, "device-side assert triggered"),
}

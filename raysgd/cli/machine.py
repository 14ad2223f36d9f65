"""What `raysgd doctor` asks each machine: versions, devices, limits, folders, connections and its clock. Both."""

from __future__ import annotations

import json
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Machine", "Probe"]

PACKAGES = ("raysgd", "ray", "torch", "tensorflow", "horovod", "lightning", "torchmetrics")
# Each is imported in a process of its own, because an import can end its process, and two frameworks can disturb each other.
IMPORTS = {
    "torch": """
import json, torch, torch.distributed as dist
gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
if gloo:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print("\\nFOUND", json.dumps({"gloo": gloo, "nccl": nccl, "cuda": torch.version.cuda, "gpus": gpus}))
""",
    "tensorflow": 'import tensorflow; print("\\nFOUND {}")',
    "horovod": 'import horovod.torch; print("\\nFOUND {}")',
}
IMPORT_S = 120.0
SECRET_BYTES = 16
SEEN_WITHIN_S = 5.0  # network file systems show a new file to other machines after a moment


@dataclass(frozen=True)
class Machine:
    """One machine, as the process sees it that Ray would start a worker in.

    versions      of the installed packages
    broken        packages whose import fails, and why
    gpus          those that torch can use; `listed_gpus` are those that the driver's `nvidia-smi` lists
    gloo_address  where gloo listens: what the host name resolves to, or the loopback address
    open_files    the soft and the hard limit
    shared_bytes  the size of /dev/shm, and what is free; None where there is none
    memory_bytes  the limit of the machine or of the container, and what is free below it; None if that is unknown
    """

    python: str
    versions: Mapping[str, str]
    host: str
    broken: Mapping[str, str] = field(default_factory=dict)
    gloo: bool | None = None
    nccl: bool | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    listed_gpus: int = 0
    gloo_address: str = "127.0.0.1"
    open_files: tuple[int, int] = (0, 0)
    shared_bytes: tuple[int, int] | None = None
    memory_bytes: tuple[int, int] | None = None


class Probe:
    """One machine's side of the checks. On a cluster, each node has an actor of this class; without one, there is an object in
    this process. Owns its listening sockets. Methods return an error as text, because it is a finding."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []

    def machine(self) -> Machine:
        """Return what is known about this machine. Its imports take seconds."""
        versions = dict(_versions())
        with ThreadPoolExecutor(len(IMPORTS)) as pool:
            tried = dict(zip(IMPORTS, pool.map(_imported, [n if n in versions else "" for n in IMPORTS]), strict=True))
        torch, _ = tried["torch"]
        return Machine(
            python=platform.python_version(),
            versions=versions,
            host=platform.node(),
            broken={name: error for name, (_, error) in tried.items() if error},
            gloo=torch.get("gloo"),
            nccl=torch.get("nccl"),
            cuda=torch.get("cuda"),
            gpus=tuple(torch.get("gpus", ())),
            listed_gpus=_listed_gpus(),
            gloo_address=gloo_address(platform.node()),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            shared_bytes=_shared_bytes(),
            memory_bytes=_memory_bytes(),
        )

    def clock(self) -> float:
        return time.time()

    def listen(self, host: str) -> tuple[int, str]:
        """Listen at this address, for any number of clients. Return the port and what each client receives; on failure, 0
        and the error."""
        secret = secrets.token_hex(SECRET_BYTES)
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            server = socket.create_server((host, 0), family=family)
        except OSError as error:
            return 0, str(error)
        self._listening.append(server)
        threading.Thread(target=_greet, args=(server, secret.encode()), name="raysgd-doctor", daemon=True).start()
        return server.getsockname()[1], secret

    def connect(self, host: str, port: int, secret: str, limit_s: float) -> str:
        """Connect to a socket of `listen`. Return why that failed, "" if it did not."""
        try:
            with socket.create_connection((host, port), timeout=limit_s) as connection:
                received = connection.recv(len(secret), socket.MSG_WAITALL).decode(errors="replace")
        except OSError as error:
            return str(error)
        return "" if received == secret else "another program answered there"

    def write(self, folder: str, name: str, content: str) -> str:
        """Write a file, through a draft that is renamed. Return why that failed, "" if it did not."""
        path = Path(folder, name)
        draft = path.with_suffix(".draft")
        try:
            with open(draft, "x", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self, folder: str, name: str, content: str) -> str:
        """Read a file that this or another machine wrote. Return why that failed, "" if it has this content."""
        until = time.monotonic() + SEEN_WITHIN_S
        while True:
            try:
                found = Path(folder, name).read_text(encoding="utf-8")
                return "" if found == content else "a file has other content than what was written"
            except OSError as error:
                if time.monotonic() > until:
                    return error.strerror or str(error)
            time.sleep(0.1)

    def remove(self, folder: str, name: str) -> None:
        Path(folder, name).unlink(missing_ok=True)

    def close(self) -> None:
        for server in self._listening:
            server.shutdown(socket.SHUT_RDWR)  # ends `accept` in the thread
            server.close()
        self._listening.clear()


def _greet(server: socket.socket, secret: bytes) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # `close` has shut the socket
            return
        with client:
            client.sendall(secret)


def gloo_address(host: str) -> str:
    """Return the address at which gloo listens on a machine with this name: the first one that the name resolves to and that
    the machine has, or the loopback address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            if _binds(trial, address):
                return str(address[0])
    return "127.0.0.1"


def _binds(trial: socket.socket, address: tuple[object, ...]) -> bool:
    try:
        trial.bind(address)
    except OSError:
        return False
    return True


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        for distribution in (name, f"{name}-cpu"):
            try:
                yield name, metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue


def _imported(name: str) -> tuple[dict[str, Any], str]:
    """Import a package in a process of its own. Return what it found there, and why the import failed."""
    if not name:
        return {}, ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS[name]], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"it did not end within {IMPORT_S:g} s"
    _, mark, found = done.stdout.rpartition("\nFOUND ")
    if done.returncode == 0 and mark:
        return dict(json.loads(found)), ""
    last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    return {}, last[:300]


def _listed_gpus() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _shared_bytes() -> tuple[int, int] | None:
    if not os.path.isdir("/dev/shm"):
        return None
    usage = shutil.disk_usage("/dev/shm")
    return usage.total, usage.free


def _memory_bytes() -> tuple[int, int] | None:
    """Return the lowest memory limit that holds for this process, with what is free below it."""
    if not os.path.exists("/proc/meminfo"):
        return None
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    found = [(kilobytes["MemTotal"] << 10, kilobytes["MemAvailable"] << 10)]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += _limits(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            found += _limits(Path("/sys/fs/cgroup/memory"), path, *names)
    return min(found, key=lambda each: each[1])


def _limits(root: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    """Yield the limits of a control group and of those above it, with what is free. Files that can be evicted from memory
    are not counted as used."""
    group = root / path.lstrip("/")
    while group.is_relative_to(root):
        try:
            most = (group / limit).read_text(encoding="ascii").strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((group / usage).read_text(encoding="ascii")) - int(stat.get(cache, 0))
        except OSError:  # inside of a container, the folders above its own may be invisible
            pass
        else:
            if most != "max" and int(most) < 1 << 60:
                yield int(most), max(int(most) - used, 0)
        group = group.parent

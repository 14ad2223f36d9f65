"""Ray starts its worker processes as forks of a process that has already imported torch.

    server = ForkServer(folder)
    with server.used_by_ray():
        ray.init(...)
    os.environ["PYTHONPATH"] = str(server.customization)  # the same for the clusters of scripts, after server.start()

Of the three seconds of CPU time that a rank needs until its first step, importing torch takes two, and the tests start
about a thousand ranks. Here, the interpreter that Ray starts for a worker is a short script. It passes its arguments,
environment, working directory, priority and standard streams to a fork server and exits; the fork then runs the same
script of Ray that the interpreter would have run. From there on nothing differs: the worker is a process of its own,
imports Ray, registers with the raylet, and can be killed.

Two servers with different hash seeds take turns, so that the iteration order of sets differs between ranks, as it does
outside the tests. During `forks.having("tensorflow")`, two other servers do, which have also imported TensorFlow. All other
processes of Ray, and workers with a `runtime_env`, start as usual. With RAYSGD_FORKED_WORKERS=0 all workers do.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ForkServer", "forks_workers", "fresh_processes"]

# Ray starts this script instead of an interpreter. Without the site module, it takes 15 ms.
LAUNCHER = """#!{python} -IS
import json, os, socket, sys
ARGUMENTS = sys.argv[1:]
def forked():
    if not (ARGUMENTS and ARGUMENTS[0].endswith("default_worker.py")):
        return False
    if os.readlink("/proc/self/ns/net") != {network!r}:  # a fork would be in the server's network
        return False
    with socket.socket(socket.AF_UNIX) as server:
        try:
            kind = next((each for each in {kinds} if os.path.exists({address!r} + each)), "torch")
            server.connect({address!r} + kind + str(os.getpid() % {servers}))
        except OSError:  # the server is still importing
            return False
        request = json.dumps([ARGUMENTS, dict(os.environ), os.getcwd(), os.nice(0)]).encode()
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
        return server.recv(1) == b"1"
if not forked():
    os.execv({python!r}, [{python!r}, *ARGUMENTS])
"""
SERVERS = 2
KINDS = ("tensorflow", "lightning", "transformers")
LOOK_S = 5.0
# Python imports this module at its start, if the folder is in PYTHONPATH. It does for scripts what `used_by_ray` does
# for this process, but not for the interpreters of other environments.
SITE_CUSTOMIZE = """import os, sys
if sys.prefix == {prefix!r} and os.path.exists({launcher!r}):
    sys.executable = {launcher!r}
"""


def forks_workers() -> bool:
    """Return whether the tests' workers are forks: on Linux, unless RAYSGD_FORKED_WORKERS is 0."""
    return sys.platform == "linux" and os.environ.get("RAYSGD_FORKED_WORKERS") != "0"


class ForkServer:
    """Owns the processes that are forked, and the script that Ray starts instead of an interpreter.

    Without `start`, or before the processes have imported everything, the script runs an interpreter."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "fork-")
        self._launcher = folder / "python"
        network = os.readlink("/proc/self/ns/net")
        settings = {"address": self._address, "servers": SERVERS, "kinds": KINDS, "network": network}
        launcher = LAUNCHER.format(python=sys.executable, **settings)
        self._launcher.write_text(launcher)
        self._launcher.chmod(0o755)
        self.customization = folder / "forks"
        self.customization.mkdir()
        module = SITE_CUSTOMIZE.format(prefix=sys.prefix, launcher=str(self._launcher))
        (self.customization / "sitecustomize.py").write_text(module)
        self._lock = threading.Lock()
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, kind: str = "torch") -> None:
        """Start the processes that import this, if they are not running yet."""
        # torch._dynamo makes this folder when it is imported, by default beside other temporary files.
        inductor = {"TORCHINDUCTOR_CACHE_DIR": str(self.customization.parent / "inductor")}
        with self._lock:
            if kind in self._processes:
                return
            self._processes[kind] = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.forked_workers", f"{self._address}{kind}{number}", kind],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **inductor, "PYTHONHASHSEED": str(int.from_bytes(os.urandom(3), "big"))},
                    start_new_session=True,
                )
                for number in range(SERVERS)
            ]

    @contextmanager
    def used_by_ray(self) -> Iterator[None]:
        """Let clusters that this process starts in this block start their workers by forking."""
        self.start()
        interpreter, sys.executable = sys.executable, str(self._launcher)
        try:
            yield
        finally:
            sys.executable = interpreter

    @contextmanager
    def having(self, kind: str) -> Iterator[None]:
        """Let workers that start in this block have imported TensorFlow, Lightning or transformers, which takes three to four
        seconds of CPU time."""
        self.start(kind)
        used = Path(self._address + kind)
        used.touch()
        try:
            yield
        finally:
            used.unlink()

    def close(self) -> None:
        processes = [process for processes in self._processes.values() for process in processes]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def serve(address: str) -> None:
    """Fork for each request. Return only in the children, which then are workers. End when the test process has ended, also
    if it was killed."""
    parent = os.getppid()
    # If it ignored the signal, the kernel would remove children, and not add their processor time to this process's.
    signal.signal(signal.SIGCHLD, reap)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address + ".new")
    server.listen(64)
    os.rename(address + ".new", address)  # clients find it only once it listens
    server.settimeout(LOOK_S)
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if os.getppid() != parent:
                sys.exit()
            continue
        with connection:
            length, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            if len(length) == 8 and os.fork() == 0:
                server.close()
                become(connection, int.from_bytes(length, "big"), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)


def reap(*_: object) -> None:
    """Remove the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become(connection: socket.socket, length: int, descriptors: list[int]) -> None:
    """Set up this process with the arguments, environment, directory and streams that the raylet gave to the script."""
    import json

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = b""
    while len(request) < length:
        request += connection.recv(1 << 16)
    arguments, environment, folder, priority = json.loads(request)
    os.setsid()
    os.nice(priority - os.nice(0))
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:  # where Linux shares out time by sessions
        group.write(str(priority))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    own_paths = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    inherited = own_paths.split(os.pathsep)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *paths, *(path for path in sys.path[1:] if path not in inherited)]
    connection.sendall(b"1")
    connection.close()


def fresh_processes() -> Any:
    """Return the context of `multiprocessing` for ranks without Ray: each is a fork of a process that has only imported torch."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "raysgd.torch.group.process_group"])
    return multiprocessing.get_context("forkserver")


# What Ray and its serialization import of other packages: half of the time that `import ray` takes.
OF_RAY = (
    "filelock",
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "pydantic.deprecated.class_validators",
    "pydantic.json_schema",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
    "wcwidth",
    "yaml",
)


def preload(kind: str) -> None:
    """Import what every rank imports, but not Ray, which reads a worker's variables when it is imported."""
    import torch._dynamo  # noqa: F401  (every optimizer imports it)

    import raysgd.torch.group.process_group
    import raysgd.torch.replica
    import raysgd.workers.actor

    for name in OF_RAY:
        with suppress(ImportError):  # another version of Ray need not have it
            import_module(name)
    if kind == "tensorflow":
        import raysgd.tf.replica
    elif kind == "lightning":
        import raysgd.train.lightning  # noqa: F401
    elif kind == "transformers":
        for name in ("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"):
            import_module(name)
        import_module("raysgd.train.huggingface.transformers")

    assert "ray" not in sys.modules


if __name__ == "__main__":
    import runpy

    preload(sys.argv[2])
    gc.freeze()  # the forks look for no garbage in all of this
    serve(sys.argv[1])
    sys.modules["numpy"].random.seed()  # or all forks would draw the same numbers
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Start workers on this machine as forks of a process that has imported their framework. Driver.

Of the three seconds of CPU time that a worker needs until its first step, importing torch takes
two. Ray starts a script of this module instead of an interpreter: for all workers of a cluster that
raysgd starts, and for a trainer's workers (with the field `py_executable` of their runtime
environment) in a cluster that the user has started. It passes its arguments, environment, working
directory, priority and standard streams to the fork server, and exits; the fork runs the same
script of Ray that the interpreter would have run. From there on nothing differs: the worker is a
process of its own, imports Ray, registers with the raylet, and can be killed.

The script runs an interpreter if the server has ended, and for all other processes of Ray."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import glob
import importlib
import json
import logging
import os
import resource
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from raysgd.environment import flag_from_environment
from raysgd.errors import described
from raysgd.storage.durable import own_folder
from raysgd.workers.cluster.processes import LocalProcess

logger = logging.getLogger("raysgd")

FORK_WORKERS = "RAYSGD_FORK_WORKERS"
REPLICAS = {"torch": "raysgd.torch.replica", "tensorflow": "raysgd.tf.replica"}
# What Ray, which itself is imported in each worker, imports of other packages if they are installed: most of its time. Not
# pyarrow, which starts a thread: forks would not have it.
OF_RAY = (
    *("google.protobuf.json_format", "jsonschema", "msgpack", "pydantic.deprecated.class_validators"),
    *("pydantic.json_schema", "pydantic.v1", "requests", "starlette.datastructures", "wcwidth", "yaml"),
)
LOOK_S = 0.2
SILENT_S = 10.0  # how long a client may send nothing
# What a process has open that uses a GPU, also of AMD, in Windows' Linux and of Jetsons.
GPUS = ("/dev/nvidia*", "/dev/nvhost-*", "/dev/nvmap", "/dev/nvgpu*", "/dev/kfd", "/dev/dxg")
OOM_SCORE = "/proc/self/oom_score_adj"  # Ray lets the kernel end workers before other processes
# Linux reads at most so many bytes of a script's first line, which cannot have spaces in the path.
FIRST_LINE_BYTES = 120
NO_FORKS = (
    "raysgd cannot fork workers: %s. So each starts from an interpreter of its own, some seconds later. RAYSGD_FORK_WORKERS=0 saves "
    "the attempt"
)
# The first folder of `sys.path` would be the working directory, in which others may write.
SERVER = "import sys; sys.path[0] = sys.argv[1]; from raysgd.workers.cluster.fork_server import main; main()"
IN_BACKGROUND = ("/bin/sh", "-c", '"$@" &', "sh")
PARENT_OF_RAYSGD = str(Path(__file__).resolve().parents[3])
# What an interpreter and native libraries read when they start, so that a fork would not see what a worker has there.
READ_ONCE = (
    *("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "GLIBC_", "GOMP_", "KERAS_", "KMP_", "LD_", "MALLOC_", "MKL_", "MKLDNN_"),
    *("NVRTC_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TF_", "TORCH", "TRITON_", "XLA_"),
)
TAKEN = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONPATH")  # Ray sets them for each worker, and forks use them
# Where this script or its Ray does not exist, or Ray runs as another user, run the interpreter that Ray is installed for.
FORK_OR_START = (
    'ray=$1; shift; case $1 in "$ray"/*) test -x "$0" && test -O "$0" && exec "$0" "$@";; esac; '
    'python=${1%/lib*/python*}/bin/python3; test -x "$python" || python=python3; exec "$python" "$@"'
)
HEAD = struct.Struct("!QQ")  # the bytes of a request, and the process that started the script
# Without the site module, this takes 15 ms.
LAUNCHER = """#!{python} -IS
import json, os, resource, socket, struct, sys
ARGUMENTS = sys.argv[1:]
IS_WORKER = ARGUMENTS[:1] and ARGUMENTS[0].endswith("default_worker.py")
READ_ONCE = {{name: value for name, value in os.environ.items() if name.startswith({names!r}) and name not in {taken!r}}}
def is_forked():
    if not IS_WORKER or READ_ONCE != {read_once!r}:
        return False
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect({address!r})
            limits = {{name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}}
            score = open({score!r}).read()
            request = json.dumps([ARGUMENTS, dict(os.environ), os.getcwd(), os.nice(0), limits, score]).encode()
            socket.send_fds(server, [struct.pack("{head}", len(request), os.getppid())], [0, 1, 2])
            server.sendall(request)
            return server.recv(1) == b"1"  # once the server has imported everything
        except OSError:
            return False
if not is_forked():
    os.execv({python!r}, [{python!r}, *ARGUMENTS])
"""


def start_fork_server(frameworks: Iterable[str] = ()) -> str:
    """Start a process that imports what workers need of these frameworks, or of those that this
    process has imported, and then forks. It ends with this one. Return the script that Ray has to
    start instead of an interpreter; "" if workers cannot be forked here: without Linux, and those
    of TensorFlow with GPUs, because it is unknown whether its import uses them."""
    chosen = [framework for framework in frameworks or REPLICAS if frameworks or framework in sys.modules]
    if any(map(glob.glob, GPUS)):
        chosen = [framework for framework in chosen if framework != "tensorflow"]
    modules = [REPLICAS[framework] for framework in chosen]
    if not (flag_from_environment(FORK_WORKERS, default=True) and modules and sys.platform == "linux"):
        return ""
    parent, python = Path(tempfile.gettempdir()), sys.executable
    if " " in python or len(python) > FIRST_LINE_BYTES or os.statvfs(parent).f_flag & os.ST_NOEXEC:
        return ""
    folder: Path | None = None
    try:
        folder = own_folder(parent, "raysgd-forks")
        return _start(folder, python, modules)
    except (OSError, subprocess.SubprocessError) as error:  # for example because the path of the socket is too long
        logger.info("each worker starts from an interpreter of its own: %s", described(error))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return ""


def _start(folder: Path, python: str, modules: Sequence[str]) -> str:
    launcher = folder / "python"
    read_once = {name: value for name, value in os.environ.items() if name.startswith(READ_ONCE) and name not in TAKEN}
    values = {"python": python, "address": str(folder / "socket"), "head": HEAD.format, "score": OOM_SCORE}
    launcher.write_text(LAUNCHER.format(**values, names=READ_ONCE, taken=TAKEN, read_once=read_once))
    launcher.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen(64)  # now, so that workers wait for the imports instead of repeating them
        command = [*IN_BACKGROUND, python, "-c", SERVER, PARENT_OF_RAYSGD]
        # The shell ends at once, so that the server is not a child of this process, which would have to wait for its end.
        subprocess.run(
            [*command, str(folder), str(server.fileno()), str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={
                "OPENBLAS_NUM_THREADS": "1",
                **os.environ,
            },  # which NumPy reads once; Ray sets OMP_NUM_THREADS for each worker
            pass_fds=[server.fileno()],
            check=True,
        )
    return str(launcher)


def command_to_fork(launcher: str, ray: str) -> str:
    """The command that Ray, in the folder `ray`, runs instead of an interpreter."""
    return shlex.join(["/bin/sh", "-c", FORK_OR_START, launcher, ray])


def serve(server: socket.socket, driver: LocalProcess, folder: str) -> None:
    """Fork for each request, until the driver or its raylet has ended. Return in the forks. End,
    too, if a fork would not work as a process of its own does; the script then runs an
    interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes children that ended
    raylet = driver  # until it is known
    clients = selectors.PollSelector()  # it has no descriptor, which the forks would share
    clients.register(server, selectors.EVENT_READ)
    while not (driver.ended or raylet.ended):
        for connection in _await_requests(clients, server):
            with connection:
                head, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 3)
                if len(head) == HEAD.size and len(descriptors) == 3:
                    length, starter = HEAD.unpack(head)
                    if raylet is driver:
                        raylet = LocalProcess(starter)
                    if lack := find_what_forks_lack():
                        sys.exit(NO_FORKS % lack)
                    if os.fork() == 0:
                        for key in list(clients.get_map().values()):
                            key.fileobj.close()  # type: ignore[union-attr]
                        _become(connection, length, descriptors)
                        return
                for each in descriptors:
                    os.close(each)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # deleting the modules would take 0.3 s


def find_what_forks_lack() -> str:
    """Find what imports have left in this process that a fork cannot use or does not have: a GPU or
    a thread. "" if there is nothing."""
    files = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, which is closed by now
            files.append(os.readlink(f"/proc/self/fd/{each}"))
    if devices := [file for file in files if any(fnmatch.fnmatch(file, each) for each in GPUS)]:
        return f"an import has opened {devices[0]}, which a fork cannot use"
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "an import has initialized CUDA, which a fork cannot use"
    if threads := [each.name for each in threading.enumerate() if each is not threading.current_thread()]:
        return f"an import has started the thread {threads[0]!r}, which a fork does not have"
    return ""


def _await_requests(clients: selectors.BaseSelector, server: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that have sent something, after at most LOOK_S. Close those that send
    nothing: a script may have been stopped before it could, and the others must not wait for it."""
    ready = [key.fileobj for key, _ in clients.select(LOOK_S)]
    if server in ready:
        clients.register(server.accept()[0], selectors.EVENT_READ, time.monotonic() + SILENT_S)
    for key in list(clients.get_map().values()):
        client = key.fileobj
        assert isinstance(client, socket.socket)
        if client is server or (client not in ready and time.monotonic() < key.data):
            continue
        clients.unregister(client)
        if client in ready:
            yield client
        else:
            client.close()


def find_worker_paths(
    script: str, environment: Mapping[str, str], paths: Sequence[str], own_environment: Mapping[str, str]
) -> list[str]:
    """Find what an interpreter would have as `sys.path` for this script. The first of the server's
    own is the parent of raysgd, which can be among the others as well."""
    theirs, inherited = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (environment, own_environment))
    installed = [path for path in paths[1:] if path not in inherited]
    return [os.path.dirname(script), *filter(None, theirs), *installed]


def _become(connection: socket.socket, length: int, descriptors: list[int]) -> None:
    """Give this process the arguments, environment, folder, priority and streams of the script."""
    for ignored in (signal.SIGCHLD, signal.SIGQUIT):  # the shell lets a process in the background ignore the latter
        signal.signal(ignored, signal.SIG_DFL)
    arguments, environment, folder, priority, limits, score = json.loads(_receive_rest(connection, length))
    os.setsid()
    os.nice(priority - os.nice(0))
    for name, limit in limits.items():  # Ray has raised some of the raylet's
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), limit)
    with contextlib.suppress(OSError):
        Path(OOM_SCORE).write_text(score)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.path[:] = find_worker_paths(arguments[0], environment, sys.path, os.environ)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or all forks would draw the same numbers
    connection.sendall(b"1")
    connection.close()


def _receive_rest(connection: socket.socket, length: int) -> bytes:
    """Receive the rest of a request. End this process if the script ends or is stopped before it
    has sent everything; if the script continues, it starts an interpreter."""
    connection.settimeout(SILENT_S)
    try:
        with connection.makefile("rb") as stream:
            request = stream.read(length)
    except TimeoutError:
        request = b""
    if len(request) != length:
        os._exit(1)
    return request


def main() -> None:
    """Import modules, and run the script of a worker in each fork."""
    folder, descriptor, driver, *modules = sys.argv[2:]
    gc.disable()  # it takes a fifth of the time of the imports, and finds little
    try:
        for module in ("raysgd.workers.actor", *modules):
            importlib.import_module(module)
        if "torch" in sys.modules:
            for module in (
                "torch._dynamo",
                "raysgd.torch.group.process_group",
            ):  # the first optimizer imports the former
                importlib.import_module(module)
        for module in OF_RAY:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    except Exception as error:  # the workers, which then are started, raise it again
        sys.exit(NO_FORKS % f"an import failed ({described(error).rstrip('.')})")
    if "ray" in sys.modules:
        sys.exit("Ray was imported too early: it reads a worker's variables then")
    gc.freeze()  # or each fork would copy the memory that its collections look at
    serve(socket.socket(fileno=int(descriptor)), LocalProcess(int(driver)), folder)
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it: Ctrl-C is for the driver
    runpy.run_path(sys.argv[0], run_name="__main__")

"""A Ray cluster of this machine that outlives the scripts that use it. Both.

A process of its own, the host, starts it as `ray.init` would in the script, and ends it when no
script is connected and no actor waits for one. A private folder has its address, in a file that the
host keeps locked. The folder is locked while a script connects, and while the host ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from raysgd.errors import ClusterError, described
from raysgd.storage.durable import open_locked, private_folder, private_place
from raysgd.workers.cluster import foreign
from raysgd.workers.cluster.fork_server import IN_BACKGROUND, PARENT_OF_RAYSGD, REPLICAS, start_fork_server
from raysgd.workers.cluster.ray_control_service import ask

logger = logging.getLogger("raysgd")

LOOK_S = 1.0
STARTED = "started"
HOST = "import sys; sys.path[0] = sys.argv[1]; from raysgd.workers.cluster.lasting_cluster import main; main(*sys.argv[2:])"


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """The folder, while no other process of this user connects, or starts or ends a host.
    Afterwards it is removed, unless it has an address."""
    place, descriptor = private_place("cluster"), -1
    while descriptor < 0:
        with contextlib.suppress(FileNotFoundError):  # a host that ends has just removed it
            descriptor = open_locked(private_folder(place), os.O_RDONLY, 0)
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):
            place.rmdir()
        os.close(descriptor)


def address() -> str:
    """Find the address of the cluster, or "" if its host does not run."""
    with contextlib.suppress(FileNotFoundError), open(private_place("cluster") / "address", encoding="utf-8") as file:
        private_folder(private_place("cluster"))  # it exists
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read()
    return ""


def start(folder: Path) -> str:
    """Start a host in the locked folder, and return the address of its cluster."""
    command = [*IN_BACKGROUND, sys.executable, "-c", HOST, PARENT_OF_RAYSGD, str(folder)]
    host = subprocess.run(
        [*command, *(name for name in REPLICAS if name in sys.modules)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # until the host closes it
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends a terminal, or a notebook's kernel, does not end it
        text=True,
        check=False,
    )
    kind, _, text = host.stdout.partition(" ")
    if kind != STARTED:
        raise ClusterError(text.strip() or "the process that starts it has ended")
    return text.strip()


def main(folder: str, *frameworks: str) -> None:
    """Be the host."""
    import ray

    for each in (signal.SIGINT, signal.SIGQUIT):  # the shell lets a process in the background ignore them
        signal.signal(each, signal.SIG_DFL)
    script, place = os.fdopen(os.dup(1), "w"), Path(folder, "address")
    os.dup2(2, 1)
    try:
        with foreign.quick_start(start_fork_server(frameworks) or sys.executable) as settings:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, _system_config=settings)
        address = ray.get_runtime_context().gcs_address
        os.write(open_locked(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), address.encode())
    except Exception as error:
        script.write(f"failed {described(error)}")
        script.close()
        raise
    script.write(f"{STARTED} {address}")
    script.close()
    while _is_used() or not _end(place):
        time.sleep(LOOK_S)
    logs = foreign.logs_folder()
    ray.shutdown()
    if logs is not None:
        shutil.rmtree(logs.parent, ignore_errors=True)


def _end(place: Path) -> bool:
    """Hide the cluster from other scripts, unless one uses it now."""
    with locked():
        if _is_used():
            return False
        place.unlink()
    return True


def _is_used() -> bool:
    """Whether a script is connected, or an actor outlives one."""
    import ray

    try:
        return bool(ask(foreign.other_scripts) or ask(lambda: ray.util.list_named_actors(all_namespaces=True)))
    except ClusterError as error:  # no script can use it any more
        logger.warning("the cluster ends: %s", error)
        return False

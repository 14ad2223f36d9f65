"""Connect to a Ray cluster: the one that is named, that runs here, or a new one. Both."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from raysgd.config import WorkerResources
from raysgd.environment import is_installed
from raysgd.errors import ClusterError, ConfigError, ResourceError, described
from raysgd.workers.cluster import foreign, lasting_cluster
from raysgd.workers.cluster.fork_server import command_to_fork, start_fork_server
from raysgd.workers.cluster.nodes import PROBE_S, alive_nodes, find_own_bundles, get_within
from raysgd.workers.cluster.ray_control_service import gcs_limit_s, require_ray

logger = logging.getLogger("raysgd")

THROUGH_CLIENT = (
    "and workers cannot reach it there. Run it on the cluster (for example with `ray job submit`), or connect with "
    "ray.init(address='auto')"
)
# Of the runtime environment of a job: with other fields, Ray chooses the interpreter of its workers.
KEEP_THE_INTERPRETER = {"config", "env_vars", "excludes", "py_modules", "working_dir"}
# The launcher (see `fork_server`) of this process's connection to a cluster; "" if all workers of that cluster are forks.
_launchers: dict[str, str] = {}
# Ray sets this in the environment of a job that was submitted with `ray job submit`.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
JOIN_S = 60.0  # for a machine that is very busy; a refusal and a wrong address are noticed within seconds
NOT_JOINED = {
    "token": "failed: it requires a token, and this process has none or another one. Set RAY_AUTH_MODE=token, and "
    "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token (`ray get-auth-token` on its head node prints it)",
    "no node": "failed: none of its nodes is on this machine, and a script must run on one of them (for example with "
    "`ray job submit`, or after `ray start --address=...` here)",
    "it does not answer": "failed: something accepts connections there, or did so, but no Ray control service (GCS) answers",
}
NOT_STARTED = (
    "Ray did not start on this machine: %s. The usual causes are an overloaded machine, and too little memory or disk space. Look at "
    "Ray's logs in /tmp/ray/session_latest/logs, end other programs, or call ray.init(...) with your own arguments before you create "
    "the trainer"
)


def ensure_cluster(resources: WorkerResources | None = None, *, lasting: bool = False) -> None:
    """Connect to the cluster that RAY_ADDRESS names or that runs here, or start one; log which. One
    that is `lasting` outlives this script. Raise ResourceError instead of starting one without the
    GPUs that a worker needs."""
    import ray

    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise ConfigError(f"this script is connected through Ray Client (ray://), {THROUGH_CLIENT}")
        if lasting and foreign.started_here():
            raise ConfigError(
                "a trainer with name= needs a cluster that outlives this script, but the running one ends with the script, which has "
                "started it. Create the trainer with the name first, which starts another cluster, or call ray.init(address=...) with "
                "the address of a running one"
            )
        return
    gpus = resources.gpus if resources is not None else 0
    if threading.current_thread() is threading.main_thread():
        _connect(gpus, lasting=lasting)
    else:
        _connect_on_permanent_thread(gpus, lasting=lasting)


def _connect_on_permanent_thread(gpus: float, *, lasting: bool) -> None:
    """Connect on a thread that never ends: what Ray starts ends with the thread that started it."""
    connected = Future[None]()

    def connect() -> None:
        try:
            _connect(gpus, lasting=lasting)
        except BaseException as error:  # raised again in the thread that needs the cluster
            connected.set_exception(error)
            return
        connected.set_result(None)
        threading.Event().wait()

    threading.Thread(target=connect, name="raysgd-ray", daemon=True).start()
    connected.result()


def _connect(gpus: float, *, lasting: bool) -> None:
    import ray

    address, was_found = _find_existing()
    if address != "local":
        _join(address, was_found)
        return
    if gpus and (present := foreign.gpus_here()) < gpus:
        raise ResourceError(
            f"each worker needs {gpus:g} GPU, this machine has {present}, and no Ray cluster is running here: pass use_gpu=False, or "
            "name a cluster with GPUs in the environment variable RAY_ADDRESS"
        )
    if lasting:
        _join_lasting(start=True)
        return
    # Without the dashboard Ray starts in half the time. Users who want the dashboard call ray.init() first.
    interpreter = start_fork_server() or sys.executable
    others = [] if _read_given_address() == "local" else foreign.find_clusters()
    try:
        with foreign.quick_start(interpreter) as settings:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, _system_config=settings)
    except Exception as error:
        raise ClusterError(NOT_STARTED % described(error).rstrip(".")) from error
    _launchers[require_ray()] = ""
    cpus = ray.cluster_resources().get("CPU", 0)
    if others:
        logger.warning(
            "another script on this machine has started a Ray cluster of its own (%s), so this script has started a second one with %g "
            "CPUs. Each counts all CPUs and GPUs as its own. To share them, run `ray start --head` before the scripts",
            ", ".join(others),
            cpus,
        )
        return
    logger.warning("no Ray cluster is running here: started a local one with %g CPUs for this script", cpus)


def _find_existing() -> tuple[str, bool]:
    """Find the address of the cluster that RAY_ADDRESS names or that runs on this machine, and
    whether it was found there. "local" if there is none."""
    setting = _read_given_address()
    address = _find_running() if setting in ("", "auto") else "local"
    return setting if address == "local" and setting else address, address != "local"


def gpus_for_workers(*, join: bool) -> float | None:
    """Count the GPUs of the cluster in which workers will run, or, in a trial of Tune, of its
    placement group. `join` says whether to join the cluster that RAY_ADDRESS names or that runs
    here. None: this process is connected to none, and one may be started on this machine."""
    connected = "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
    if not connected and not (join and _find_existing()[0] != "local"):
        return None
    ensure_cluster()
    group = find_own_bundles()
    resources = alive_nodes().values() if group is None else group.bundle_specs
    return float(sum(each.get("GPU", 0) for each in resources))


def _join_lasting(*, start: bool) -> str:
    """Join the cluster of this machine that outlives scripts, or start it. Return its address."""
    import ray

    with lasting_cluster.locked() as folder:
        current = lasting_cluster.address()
        if not (current or start):
            return ""
        if current:
            _probe(current, True)
        try:
            address = current or lasting_cluster.start(folder)
            foreign.use_token_if_available()
            ray.init(address=address, logging_level=logging.WARNING)
        except Exception as error:
            if current:
                raise ClusterError(_not_joined(current, True, f"failed ({described(error)})")) from error
            raise ClusterError(NOT_STARTED % described(error).rstrip(".")) from error
    _launchers[require_ray()] = ""
    if not current:
        logger.warning(
            "no Ray cluster is running here: started one with %g CPUs, which ends when no script uses it and no trainer with a "
            "name waits in it",
            ray.cluster_resources().get("CPU", 0),
        )
    return address


def forking_environment() -> dict[str, Any]:
    """The runtime environment with which Ray forks workers on a cluster of the user, or {}. The
    fork server ends with this process or with the cluster."""
    import ray

    session = require_ray()
    if session not in _launchers and _can_fork() and (launcher := start_fork_server()):
        _launchers[session] = launcher
    launcher = _launchers.get(session, "")
    return {"py_executable": command_to_fork(launcher, os.path.dirname(ray.__file__))} if launcher else {}


def _can_fork() -> bool:
    """Whether this process may start a fork server: on several machines, each would need one, and
    an actor, such as a trial of Tune, rarely starts enough workers."""
    import ray

    here = ray.get_runtime_context()
    if here.get_actor_id() is not None or set(here.runtime_env) - KEEP_THE_INTERPRETER:
        return False
    nodes = get_within(gcs_limit_s(), alive_nodes) or {}
    return "py_executable" in ray.runtime_env.RuntimeEnv.known_fields and set(nodes) == {here.get_node_id()}


def join_running() -> str:
    """Connect to the cluster that RAY_ADDRESS names or that runs on this machine. Return its
    address, "" if there is none. Raise `ClusterError` or `ConfigError` if that is not possible."""
    address, was_found = _find_existing()
    if address in ("local", "auto"):
        return _join_lasting(start=False)
    _join(address, was_found)
    return address


def _join(address: str, was_found: bool) -> None:
    """Join an existing cluster, which was found on this machine or named by RAY_ADDRESS. Raise
    `ClusterError` within seconds if that is not possible."""
    import ray

    if was_found:
        logger.warning(
            "joining the Ray cluster at %s, which was found on this machine; set the environment variable "
            "RAY_ADDRESS=local to start one of your own instead",
            address,
        )
    folder = folder_of_script() if _probe(address, was_found) else None
    environment = {"working_dir": str(folder)} if folder is not None else None
    try:
        context: Any = ray.init(address=address, logging_level=logging.WARNING, runtime_env=environment)
    except Exception as error:
        raise ClusterError(_not_joined(address, was_found, f"failed ({described(error)})")) from error
    logger.info("connected to the Ray cluster at %s", context.address_info.get("gcs_address", address))


def folder_of_script() -> Path | None:
    """The folder with the script's own modules: the first of `sys.path` that is not installed."""
    folders = (Path(entry or ".").resolve() for entry in sys.path)
    return next((each for each in folders if each.is_dir() and not is_installed(str(each))), None)


def _probe(address: str, was_found: bool) -> bool:
    """Return whether the cluster has other machines, to which Ray does not bring the script's
    modules by itself. Raise `ClusterError` within seconds if it does not answer: Ray's own client
    waits for minutes, and then ends this process. Afterwards this process sends the token of a
    cluster that was found on this machine."""
    if was_found:
        foreign.use_token_if_available()
    if JOB_CONFIG in os.environ or ":" not in address:  # Ray itself has started a submitted job in its cluster
        return False
    answer = foreign.probe_gcs(address, JOIN_S)
    if answer not in ("ok", "others"):
        raise ClusterError(_not_joined(address, was_found, NOT_JOINED.get(answer, f"failed: {answer}")))
    return answer == "others"


def _not_joined(address: str, was_found: bool, why: str) -> str:
    source = "found on this machine" if was_found else "which RAY_ADDRESS names"
    remedy = "set the environment variable RAY_ADDRESS=local to start a cluster of your own for this script"
    stale = ". If that cluster no longer exists, `ray stop` removes its address" if was_found else ""
    return f"joining the Ray cluster at {address}, {source}, {why}. Correct that, or {remedy}{stale}"


def _read_given_address() -> str:
    """Read RAY_ADDRESS. Raise an error if it is wrong: Ray's own are less clear, or come late."""
    text = os.environ.get("RAY_ADDRESS", "").strip()
    if text.startswith("ray://"):
        raise ConfigError(
            f"the environment variable RAY_ADDRESS is {text!r}, an address of Ray Client, {THROUGH_CLIENT}"
        )
    host, _, port = text.rpartition(":")
    if text in ("", "auto", "local") or "://" in text or (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        return text
    raise ConfigError(
        f"the environment variable RAY_ADDRESS is {text!r}; it must be 'auto', 'local' or HOST:PORT. Correct it, or unset it "
        "to use the cluster that is running on this machine, or a new one"
    )


def _find_running() -> str:
    """Find the address of the cluster that this machine belongs to, or "local". After a crash, its
    address is still stored, and joining would take minutes to fail, so probe it first."""
    address = foreign.address_of_this_machine()
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return "local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except OSError:
        return "local"
    return address

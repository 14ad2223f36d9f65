"""Connect to the Ray cluster, and ask for its resources and nodes. Both."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from raysgd.config import WorkerResources
from raysgd.environment import FUNCTION_START_LIMIT, GLOO_INTERFACE, NCCL_INTERFACE, START_LIMIT
from raysgd.errors import ClusterError, ConfigError, ResourceError, counted, described
from raysgd.workers import foreign, lasting_cluster
from raysgd.workers.fork_server import command_to_fork, start_fork_server
from raysgd.workers.ray_control_service import GcsQuery, ask, gcs_limit_s, require_ray
from raysgd.workers.serialization import is_installed
from raysgd.workers.worker_group import Room

logger = logging.getLogger("raysgd")

T = TypeVar("T")

PROBE_S = 0.3
STDERR_TAIL_BYTES = 1 << 14
LOOK_S = 0.02
ENDED_S, FREED_S = 2.0, 2.0
THROUGH_CLIENT = (
    "and workers cannot reach it there. Run it on the cluster (for example with `ray job submit`), or connect with "
    "ray.init(address='auto')"
)
NODE_QUERY_S = 2.0
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

    address, found = _find_existing()
    if address != "local":
        _join(address, found)
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
    given = _read_given_address()
    found = _find_running() if given in ("", "auto") else "local"
    return given if found == "local" and given else found, found != "local"


def gpus_for_workers(*, join: bool) -> float | None:
    """Count the GPUs of the cluster in which workers will run, or, in a trial of Tune, of its
    placement group. `join` says whether to join the cluster that RAY_ADDRESS names or that runs
    here. None: this process is connected to none, and one may be started on this machine."""
    connected = "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
    if not connected and not (join and _find_existing()[0] != "local"):
        return None
    ensure_cluster()
    group = find_own_bundles()
    held = alive_nodes().values() if group is None else group.bundle_specs
    return float(sum(each.get("GPU", 0) for each in held))


def _join_lasting(*, start: bool) -> str:
    """Join the cluster of this machine that outlives scripts, or start it. Return its address."""
    import ray

    with lasting_cluster.locked() as folder:
        found = lasting_cluster.address()
        if not (found or start):
            return ""
        if found:
            _probe(found, True)
        try:
            address = found or lasting_cluster.start(folder)
            foreign.use_token_if_available()
            ray.init(address=address, logging_level=logging.WARNING)
        except Exception as error:
            if found:
                raise ClusterError(_not_joined(found, True, f"failed ({described(error)})")) from error
            raise ClusterError(NOT_STARTED % described(error).rstrip(".")) from error
    _launchers[require_ray()] = ""
    if not found:
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
    address, found = _find_existing()
    if address in ("local", "auto"):
        return _join_lasting(start=False)
    _join(address, found)
    return address


def _join(address: str, found: bool) -> None:
    """Join an existing cluster, which was found on this machine or named by RAY_ADDRESS. Raise
    `ClusterError` within seconds if that is not possible."""
    import ray

    if found:
        logger.warning(
            "joining the Ray cluster at %s, which was found on this machine; set the environment variable "
            "RAY_ADDRESS=local to start one of your own instead",
            address,
        )
    folder = folder_of_script() if _probe(address, found) else None
    environment = {"working_dir": str(folder)} if folder is not None else None
    try:
        context: Any = ray.init(address=address, logging_level=logging.WARNING, runtime_env=environment)
    except Exception as error:
        raise ClusterError(_not_joined(address, found, f"failed ({described(error)})")) from error
    logger.info("connected to the Ray cluster at %s", context.address_info.get("gcs_address", address))


def folder_of_script() -> Path | None:
    """The folder with the script's own modules: the first of `sys.path` that is not installed."""
    folders = (Path(entry or ".").resolve() for entry in sys.path)
    return next((each for each in folders if each.is_dir() and not is_installed(str(each))), None)


def _probe(address: str, found: bool) -> bool:
    """Return whether the cluster has other machines, to which Ray does not bring the script's
    modules by itself. Raise `ClusterError` within seconds if it does not answer: Ray's own client
    waits for minutes, and then ends this process. Afterwards this process sends the token of a
    cluster that was found on this machine."""
    if found:
        foreign.use_token_if_available()
    if JOB_CONFIG in os.environ or ":" not in address:  # Ray itself has started a submitted job in its cluster
        return False
    answer = foreign.probe_gcs(address, JOIN_S)
    if answer not in ("ok", "others"):
        raise ClusterError(_not_joined(address, found, NOT_JOINED.get(answer, f"failed: {answer}")))
    return answer == "others"


def _not_joined(address: str, found: bool, why: str) -> str:
    source = "found on this machine" if found else "which RAY_ADDRESS names"
    own = "set the environment variable RAY_ADDRESS=local to start a cluster of your own for this script"
    stale = ". If that cluster no longer exists, `ray stop` removes its address" if found else ""
    return f"joining the Ray cluster at {address}, {source}, {why}. Correct that, or {own}{stale}"


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


def named_address() -> str | None:
    """Find this machine's address at the network interface that the user has chosen for gloo or
    NCCL, if there is one, and it leads to other machines."""
    variables = GLOO_INTERFACE, NCCL_INTERFACE
    chosen = [os.environ.get(variable, "").split(",")[0].removeprefix("=") for variable in variables]
    if not any(chosen):
        return None
    import psutil  # Ray brings it

    known = psutil.net_if_addrs()
    found = [each for name in chosen for each in known.get(name, ()) if each.family == socket.AF_INET]
    return next((str(each.address) for each in found if not each.address.startswith("127.")), None)


def driver_address() -> str:
    """The address under which other nodes reach this process's machine: at the interface that the
    user has chosen, so that states do not take a slower network, or else the one that Ray uses."""
    import ray

    return named_address() or str(ray.util.get_node_ip_address())


def end_actor(handle: Any) -> None:
    """End an actor, which may have ended already, with its node or with Ray itself."""
    import ray

    try:
        ray.kill(handle)
    except Exception as error:
        logger.debug("%r was not ended: %s", handle, error)


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """The total resources of every node that is alive, by node id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ask(ray.nodes) if node["Alive"]}


def is_node_alive(node: str) -> bool:
    """Whether the node's manager accepts connections: Ray reports its failure seconds later. True
    also if Ray does not answer, because then nothing is known."""
    import ray

    try:
        nodes = ask(ray.nodes, limit_s=NODE_QUERY_S)
    except ClusterError as error:
        logger.debug("it is unknown whether node %s is alive: %s", node, error)
        return True
    for each in nodes:
        if each["NodeID"] == node and each["Alive"]:
            try:
                socket.create_connection((each["NodeManagerAddress"], each["NodeManagerPort"]), timeout=PROBE_S).close()
            except OSError:
                return False
            return True
    return False


def stderr_tail(pid: int) -> str:
    """The end of the standard error of a Ray process on this machine, or ""."""
    folder = foreign.logs_folder()
    if folder is None or not pid:
        return ""
    files = sorted(folder.glob(f"worker-*-{pid}.err"), key=os.path.getmtime)
    if not files:
        return ""
    with open(files[-1], "rb") as file:
        file.seek(max(os.path.getsize(files[-1]) - STDERR_TAIL_BYTES, 0))
        return file.read().decode(errors="replace")


def find_own_bundles() -> Any:
    """Find the placement group of this process, unless what it starts runs outside of it."""
    import ray

    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def choose_placement() -> Any:
    """Choose the scheduling strategy of workers: over the nodes, or in a Tune trial's bundles."""
    import ray

    group = find_own_bundles()
    if group is None:
        return "SPREAD"
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)


def room_for(resources: WorkerResources) -> Room:
    """For how many workers there is room. None of them spans two nodes."""
    leaving = ask(foreign.draining_nodes)
    free = [each for node, each in ask(foreign.free_resources_by_node).items() if node not in leaving]
    needs = {name: (each, sum(node.get(name, 0.0) for node in free)) for name, each in resources.as_dict().items()}
    capacity = sum(resources.fits(total) for total in alive_nodes().values())
    return Room(sum(resources.fits(_held(node)) for node in free), capacity, can_grow(), needs)


def _held(free: Mapping[str, float]) -> Mapping[str, float]:
    """What this process may use: all, or the resources of its placement group."""
    group = find_own_bundles()
    if group is None:
        return free
    mark = f"_group_{group.id.hex()}"
    return {name.removesuffix(mark): amount for name, amount in free.items() if name.endswith(mark)}


def can_grow() -> bool:
    """Whether nodes may be added. A cluster that this process joined may have an autoscaler, which
    nothing announces. To its own, only the user adds nodes, who has then set a limit for that."""
    import ray

    announced = any(os.environ.get(name) for name in (START_LIMIT, FUNCTION_START_LIMIT))
    own = foreign.started_here() or ray.get_runtime_context().gcs_address == lasting_cluster.address()
    return announced or not own


def get_within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Get what a call of Ray's functions returns, or None if it fails or takes longer. If Ray has
    ended, its functions take a minute or never return."""
    try:
        return GcsQuery(call).result(limit_s)
    except Exception as error:
        logger.debug("Ray did not answer: %s", error)
        return None


def wait_for_room(resources: WorkerResources, room: int, ended: Sequence[Any]) -> None:
    """Wait until these actors have ended and `room` more workers fit again, but not long: other
    programs may take that room before this process sees it."""
    import ray

    def wait() -> None:
        ray.wait([actor.__ray_ready__.remote() for actor in ended], num_returns=len(ended), timeout=ENDED_S)
        until = time.monotonic() + FREED_S
        while room_for(resources).free < room and time.monotonic() < until:
            time.sleep(LOOK_S)

    get_within(ENDED_S + FREED_S, wait)


def warn_no_room_for_data(nodes: Sequence[str], cpus_per_worker: float, names: str) -> bool:
    """Warn if these workers leave no CPU for the tasks that read the data. Return whether."""
    held = Counter(nodes)
    total = {node: float(resources.get("CPU", 0)) for node, resources in alive_nodes().items()}
    if not nodes or any(total[node] - cpus_per_worker * held[node] >= 1 for node in total):
        return False
    logger.warning(
        "no CPU is left to read the data (%s): nearly all of the cluster's %g are held by %s with %g CPU each. Ray "
        "Data's tasks wait until one is free, and training waits for them. Use fewer workers or smaller ones "
        "(resources_per_worker={'CPU': 0.5}), add nodes, or start Ray with more logical CPUs: ray.init(num_cpus=...)",
        names,
        sum(total.values()),
        counted(len(nodes), "worker"),
        cpus_per_worker,
    )
    return True

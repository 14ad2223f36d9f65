"""Ask the Ray cluster to which this process is connected for its nodes and resources, and for room
for workers. Both."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raysgd.config import WorkerResources
from raysgd.environment import FUNCTION_START_LIMIT, GLOO_INTERFACE, NCCL_INTERFACE, START_LIMIT
from raysgd.errors import ClusterError, counted
from raysgd.workers.cluster import foreign, lasting_cluster
from raysgd.workers.cluster.ray_control_service import GcsQuery, ask

logger = logging.getLogger("raysgd")

T = TypeVar("T")

PROBE_S = 0.3
STDERR_TAIL_BYTES = 1 << 14
LOOK_S = 0.02
ENDED_S, FREED_S = 2.0, 2.0
NODE_QUERY_S = 2.0


@dataclass(frozen=True)
class Room:
    """For how many workers a cluster has room.

    free      how many more fit now
    capacity  how many there could be if it were empty
    grows     whether nodes may be added to it while a request waits for them
    needs     of each resource, how much a worker needs, and how much is free
    """

    free: int
    capacity: int
    grows: bool = False
    needs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def demand(self, count: int) -> str:
        """What `count` workers need, and what is free: "4 CPU (2 free)"."""
        return ", ".join(f"{count * each:g} {name} ({free:g} free)" for name, (each, free) in self.needs.items())


def named_address() -> str | None:
    """Find this machine's address at the network interface that the user has chosen for gloo or
    NCCL, if there is one, and it leads to other machines."""
    variables = GLOO_INTERFACE, NCCL_INTERFACE
    chosen = [os.environ.get(variable, "").split(",")[0].removeprefix("=") for variable in variables]
    if not any(chosen):
        return None
    import psutil  # Ray brings it

    known = psutil.net_if_addrs()
    addresses = [each for name in chosen for each in known.get(name, ()) if each.family == socket.AF_INET]
    return next((str(each.address) for each in addresses if not each.address.startswith("127.")), None)


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
    is_own = foreign.started_here() or ray.get_runtime_context().gcs_address == lasting_cluster.address()
    return announced or not is_own


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
    counts = Counter(nodes)
    total = {node: float(resources.get("CPU", 0)) for node, resources in alive_nodes().items()}
    if not nodes or any(total[node] - cpus_per_worker * counts[node] >= 1 for node in total):
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

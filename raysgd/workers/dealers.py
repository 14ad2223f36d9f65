"""Starts the actors that read Ray Datasets, on CPUs that workers have left. Driver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysgd.errors import counted
from raysgd.ray_data.dealer import Dealer
from raysgd.workers import cluster, ray_control_service

logger = logging.getLogger("raysgd")


def start_dealer(name: str, packed: bytes) -> Any:
    """Start a dealer that the driver owns, on its node and without a CPU: readers use CPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(Dealer)
    return ray_control_service.ask(
        lambda: actor.options(name=name, num_cpus=0, scheduling_strategy=here).remote(packed)
    )


def warn_no_room_for_data(nodes: Sequence[str], cpus_per_worker: float, names: str) -> bool:
    """Warn if these workers leave no CPU for the tasks that read the data. Return whether."""
    held = Counter(nodes)
    total = {node: float(resources.get("CPU", 0)) for node, resources in cluster.alive_nodes().items()}
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

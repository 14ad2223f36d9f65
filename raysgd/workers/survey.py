"""Join a cluster that is running, and have one actor on each of its nodes, for `raysgd doctor`. Driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.errors import described
from raysgd.workers.cluster import driver_address, join_running
from raysgd.workers.gcs import ask

__all__ = ["Node", "driver_address", "join_running", "nodes_with"]


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its address, its GPUs as Ray counts them, and a function that calls a method there."""

    address: str
    gpus: float
    call: Callable[..., Any]


def nodes_with(actor: type) -> Mapping[str, Node]:
    """Start an actor of this class on each node that is alive. Return the nodes by name. An actor ends with the script, and
    reserves no CPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found: dict[str, Node] = {}
    for node in ask(ray.nodes):
        if not node["Alive"]:
            continue
        identity, address, resources = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        place = NodeAffinitySchedulingStrategy(identity, soft=False)
        handle: Any = ray.remote(actor).options(num_cpus=0, scheduling_strategy=place, max_concurrency=8).remote()
        name = address if address not in [each.address for each in found.values()] else f"{address} ({identity[:6]})"
        found[name] = Node(address, resources.get("GPU", 0.0), _caller(handle))
    return found


def _caller(handle: Any) -> Callable[..., Any]:
    def call(limit_s: float, method: str, *arguments: Any) -> Any:
        """Return what the method returns. Raise RuntimeError if the node does not answer within the limit."""
        import ray

        try:
            return ray.get(getattr(handle, method).remote(*arguments), timeout=limit_s)
        except Exception as error:
            raise RuntimeError(described(error)) from error

    return call

"""Call functions on each node of a cluster, for `raysgd doctor`. Driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysgd.errors import described
from raysgd.workers import gcs


class Runner:
    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def actors_on_nodes() -> dict[str, Any]:
    """Return an actor on each node that is alive, by its address. They reserve no CPU, and end with
    the script."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found: dict[str, Any] = {}
    for node in gcs.ask(ray.nodes):
        if node["Alive"]:
            name, place = node["NodeManagerAddress"], NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor: Any = ray.remote(Runner).options(num_cpus=0, scheduling_strategy=place)
            found[name if name not in found else f"{name} ({node['NodeID'][:6]})"] = actor.remote()
    return dict(sorted(found.items()))  # Ray lists them in another order each time


def ask(nodes: Mapping[str, Any], limit_s: float, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Call a function on these nodes at once; None is this process. Return what it returns, or its
    error."""
    import ray

    found: dict[str, Any] = {name: actor and actor.run.remote(function, *arguments) for name, actor in nodes.items()}
    for name, answer in found.items():
        try:
            found[name] = ray.get(answer, timeout=limit_s) if answer is not None else function(*arguments)
        except Exception as error:  # the caller judges it; Ray wraps what a function raises
            found[name] = RuntimeError(described(getattr(error, "cause", error)))
    return found

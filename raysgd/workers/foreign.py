"""Wrap all private names of Ray that raysgd uses. Both.

Checked with Ray 2.60. `tests/test_foreign.py` calls every function here, and names the first private name that a new
version of Ray no longer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["address_of_this_machine", "draining_nodes", "free_resources_by_node", "logs_folder", "split_coordinator"]


def address_of_this_machine() -> str:
    """Return the address of the cluster that was last started on this machine, which may have ended, "" if there is
    none."""
    from ray._private.utils import read_ray_address

    return str(read_ray_address() or "")


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of every node, by node id. This waits for the GCS: see `gcs`."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def logs_folder() -> Path | None:
    """Return the folder in which Ray keeps the output of this machine's workers, or None if this process started no
    Ray."""
    from ray._private.worker import _global_node

    return None if _global_node is None else Path(_global_node.get_logs_dir_path())


def draining_nodes() -> set[str]:
    """Return the nodes that will be removed soon (preemption, downscaling); none if this Ray cannot tell. This waits
    for the GCS: see `gcs`."""
    import ray

    ask = getattr(ray._private.state.state, "get_draining_nodes", None)
    return set(ask()) if ask is not None else set()


def split_coordinator(iterator: Any) -> Any:
    """Return the actor that divides a dataset for an iterator of `streaming_split`, or None."""
    return getattr(iterator, "_coord_actor", None)

"""Wrap all private names of Ray that raysgd uses. Both.

Checked with Ray 2.60. `tests/package/test_foreign.py` calls every function here, and names the
first private name that a new version of Ray no longer has."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Ray's client waits for minutes for a GCS that does not answer or refuses its token, cannot be interrupted meanwhile, and
# ends its process in the end. So another process tries it.
PROBE = """
import sys
import ray
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
try:
    from ray._private.services import find_node_ids
except ImportError:
    print("PROBE ok")
else:
    alive, here = {node.hex() for node, info in nodes.items() if info.state == 0}, set(find_node_ids())
    print("PROBE", "no node" if alive.isdisjoint(here) else "ok" if alive <= here else "others")
"""
PROBED = re.compile(
    r"PROBE (?P<end>ok|others|no node)|(?P<token>Unauthenticated|AuthToken|Authentication)|(?P<silent>Failed to connect)"
)


def address_of_this_machine() -> str:
    """The address of the cluster that was last started here, which may have ended, or ""."""
    from ray._private.utils import read_ray_address

    return str(read_ray_address() or "")


def find_clusters() -> list[str]:
    """Find the addresses of all clusters that have processes on this machine."""
    from ray._private import services

    return sorted(services.find_gcs_addresses())


def probe_gcs(address: str, limit_s: float) -> str:
    """Ask a GCS: "ok" if one answers there, "others" if it does and has nodes on other machines
    too, "token" if it refuses this process's token, "no node" if none of its nodes is on this
    machine, and otherwise what happened."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROBE, address], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            until = time.monotonic() + limit_s
            while True:
                ended = process.poll() is not None
                content = os.pread(output.fileno(), 1 << 20, 0)  # the process has the same position in the file
                text = content.decode(errors="replace")
                if match := PROBED.search(text):
                    return match["end"] or ("token" if match["token"] else "it does not answer")
                if ended:
                    return (text.strip().splitlines() or ["Ray's client ended without a message"])[-1]
                if time.monotonic() > until:
                    return f"it did not answer within {limit_s:g} s"
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()


def use_token_if_available() -> None:
    """Let Ray's clients in this process send the user's token, if there is one. Ray does that
    itself only for a cluster that it finds on this machine, and not for an address that it gets."""
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # a Ray without tokens
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


# Ray's object store and raylet start at the same time. If the store is later, the raylet looks for it again after this time,
# which is 1 s by default.
QUICK = {"raylet_client_connect_timeout_milliseconds": 20, "raylet_client_num_connect_attempts": 1500}


@contextlib.contextmanager
def quick_start(interpreter: str) -> Iterator[dict[str, Any]]:
    """Let `ray.init` start only what a cluster of one machine without a dashboard needs, and let
    that cluster start its workers with this interpreter. Yield the settings to pass to it as
    `_system_config`.

    Ray's line that this cluster has a token is not shown. Left out are the autoscaler, and the
    server of the dashboard, which otherwise starts even without the dashboard, and for which
    `ray.init` waits."""
    from ray._private import node, services

    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    names = (
        (services, "start_api_server", lambda *a, **k: (None, None)),
        (node.Node, "start_monitor", lambda self: None),
    )
    executable, sys.executable = sys.executable, interpreter
    replaced = [(owner, name, getattr(owner, name), instead) for owner, name, instead in names if hasattr(owner, name)]
    for owner, name, _, instead in replaced:
        setattr(owner, name, instead)
    try:
        yield dict(QUICK)
    finally:
        sys.executable = executable
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)


# What a raylet publishes when a worker ends unexpectedly; Ray prints it on the driver.
DEATH = re.compile(
    r"A worker died or was killed .*\bNode ID: (?P<node>[0-9a-f]+)\b.*\bWorker PID: (?P<pid>\d+)\b", re.DOTALL
)


class DeathFilter:
    """Prints the errors that Ray's nodes publish, but not the paragraphs about the ends of these
    workers, once each and until a time: later, a process of somebody else can have the same id."""

    def __init__(self, show: Callable[..., None]) -> None:
        self.show = show
        self.workers: dict[tuple[str, int], float] = {}

    def __call__(self, data: Any, *args: Any, **kwargs: Any) -> None:
        match = DEATH.match("\n".join(data["lines"])) if data["pid"] == "raylet" else None
        worker = (match["node"], int(match["pid"])) if match is not None else None
        until = self.workers.pop(worker, 0.0) if worker is not None else 0.0
        if until < time.monotonic():
            self.show(data, *args, **kwargs)


def hide_deaths_of(node: str, pid: int, for_s: float = math.inf) -> None:
    """Do not let Ray print its own paragraph when this worker ends, because raysgd logs that. Ray's
    other messages and the output of workers are shown as before. Ray prints it, if at all, within
    seconds, so `for_s` is short for a worker that has ended."""
    from ray._private import worker

    show = getattr(worker, "print_to_stdstream", None)
    if show is None:  # a Ray that prints it in another way
        return
    if not isinstance(show, DeathFilter):
        worker.print_to_stdstream = show = DeathFilter(show)
    now = time.monotonic()
    for known, until in list(show.workers.items()):  # Ray's thread removes some meanwhile
        if until <= now:
            show.workers.pop(known, None)
    show.workers[node, pid] = now + for_s


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """The free resources of every node, by node id. This waits for the GCS: see `gcs`."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def gpus_here() -> int:
    """How many GPUs a cluster that is started on this machine will have."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    present: int = manager.get_current_node_num_accelerators()
    return present if visible is None else min(present, len(visible))


def started_here() -> bool:
    """Whether this process started the cluster, and did not join an existing one."""
    from ray._private.worker import _global_node

    return _global_node is not None and bool(_global_node.is_head())


def other_scripts() -> int:
    """How many other drivers are connected to this one's cluster. This waits for the GCS."""
    import ray
    from ray._private.state import jobs

    mine = ray.get_runtime_context().get_job_id()
    return sum(not job["IsDead"] and job["JobID"] != mine for job in jobs())


def is_exit_of_actor(error: BaseException) -> bool:
    """Whether `ray.actor.exit_actor()` raised this error, which ends the actor's process.
    `sys.exit()` raises the same type, without Ray's message."""
    return isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg")


def logs_folder() -> Path | None:
    """The folder of this machine's workers' output, or None if this process has no Ray."""
    from ray._private.worker import _global_node

    return None if _global_node is None else Path(_global_node.get_logs_dir_path())


def draining_nodes() -> dict[str, float | None]:
    """The nodes that will be removed soon, and when, as `time.time()` counts (None: unknown). This
    waits for the GCS: see `gcs`."""
    import ray

    ask = getattr(ray._private.state.state, "get_draining_nodes", dict)
    return {node: at_ms / 1000 if at_ms > 0 else None for node, at_ms in ask().items()}


def replace_report_to_tune(report: Callable[..., None]) -> Callable[..., None]:
    """Let `ray.tune.report` call this in a function of Tune. Return Tune's own function for it."""
    from ray.train._internal.session import get_session

    session: Any = get_session()
    session.report = report
    return functools.partial(type(session).report, session)


def split_coordinator(iterator: Any) -> Any:
    """The actor that divides a dataset for an iterator of `streaming_split`, or None."""
    return getattr(iterator, "_coord_actor", None)

"""A small test session, which test_session_cleanup.py runs as a developer would: it starts one cluster of each kind that tests use."""

import os

import ray
from ray.cluster_utils import Cluster


def test_the_shared_cluster(ray_cluster: None) -> None:
    _say("SHARED", ray.get_runtime_context().gcs_address)
    assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()


def test_a_cluster_of_several_nodes() -> None:
    """Leave this cluster without a clean shutdown, which alone would remove the file with its address."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    _say("NODES", cluster.address)
    cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def _say(word: str, value: str) -> None:
    with open(os.environ["RAYSGD_TINY_NOTES"], "a", encoding="utf-8") as notes:
        notes.write(f"{word} {value} {os.environ.get('RAY_TMPDIR', '/tmp')}\n")

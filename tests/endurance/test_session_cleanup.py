"""A test run does not affect a user's Ray cluster, and leaves no file behind: it gives Ray its own temporary folder."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.background import Background

SMALL_SESSION = Path(__file__).with_name("small_session.py")

# A cluster that a developer runs beside the tests. Other processes find it through its address file.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
FIND = "import ray; ray.init(log_to_driver=False); print(ray.get_runtime_context().gcs_address)"


@dataclass
class Seen:
    """What a test run changed in the folders of a user who runs a cluster."""

    address: str
    output: str = ""
    found: str = ""
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    notes: list[list[str]] = field(default_factory=list)


def run(background: Background) -> Seen:
    # The path must be short, because Ray creates sockets there.
    with tempfile.TemporaryDirectory(prefix="user-", dir="/tmp", ignore_cleanup_errors=True) as name:
        user = Path(name)
        own = {"RAY_TMPDIR": name, "TMPDIR": name, "RAYSGD_TINY_NOTES": str(background.folder() / "notes")}
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
        )
        try:
            assert process.stdout is not None
            seen = Seen(process.stdout.readline().strip(), before=listed(user))
            tests = (
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--rootdir={SMALL_SESSION.parents[2]}",
                str(SMALL_SESSION),
            )
            done = background.run(*tests, folder=SMALL_SESSION.parents[2], **own, HOME=name, RAY_AUTH_TOKEN="")
            seen.output, seen.after = done.stdout + done.stderr, listed(user)
            seen.found = background.run("-c", FIND, **own, RAY_ADDRESS="auto").stdout
            notes = Path(own["RAYSGD_TINY_NOTES"])
            seen.notes = [line.split() for line in notes.read_text(encoding="utf-8").splitlines()]
            return seen
        finally:
            process.communicate(timeout=120)


def listed(user: Path) -> set[str]:
    """Return the user's files and folders, without the content of their clusters' folders, which changes while they run."""
    address = user / "ray" / "ray_current_cluster"
    return {
        *(str(path.relative_to(user)) for pattern in ("*", "ray/*") for path in user.glob(pattern)),
        f"address: {address.read_text(encoding='utf-8') if address.exists() else ''}",
    }


@pytest.mark.nightly
@pytest.mark.script(run=run)
def test_a_users_cluster_is_found_after_a_test_run(outcome: Callable[[], Seen]) -> None:
    seen = outcome()
    assert "2 passed" in seen.output, seen.output
    assert seen.after == seen.before
    assert seen.found.strip() == seen.address

    assert [word for word, *_ in seen.notes] == ["SHARED", "NODES"]
    usual = Path("/tmp/ray/ray_current_cluster")
    named = usual.read_text(encoding="utf-8").strip() if usual.exists() else ""
    for _, address, folder in seen.notes:
        assert not Path(folder).exists(), f"{folder} was left behind"
        assert address != named, f"{usual} names a cluster of the test run"

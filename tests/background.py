"""Run the scripts that tests check (pages, examples, benchmarks).

A test names its script in a mark, and gets a function that returns the script's outcome:

    @pytest.mark.script("two_models.py", run=run)   # run(background, "two_models.py"), and the test's own parameters
    def test_two_models(outcome):
        assert "done" in outcome()
"""

import os
import secrets
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.forked_workers import ForkServer
from tests.tiers import NIGHTLY

__all__ = ["LIMIT_S", "Background", "start_ray"]

# The time after which a script hangs.
LIMIT_S = 7200 if NIGHTLY else 900
# A cluster for all scripts that do not need their own, because starting one takes longer than most scripts.
CLUSTER = """
import sys, ray
from tests.background import start_ray
start_ray()
print("ADDRESS", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def start_ray() -> None:
    """Start a cluster with 8 logical CPUs. Ray waits 30 s for its own processes: on a busy machine, try once more."""
    import ray

    for again in (True, False):
        try:
            ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            if not again or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


class Background:
    """Runs scripts. Owns their folder, their cluster, and the thread that starts them: the guard in `tests/guards.py`
    recognizes processes that outlive a test by their thread."""

    def __init__(self, forks: ForkServer | None) -> None:
        self._forks = forks
        self._made = tempfile.TemporaryDirectory(prefix="scripts-")
        self._cluster: subprocess.Popen[str] | None = None
        self._environment = dict(os.environ)  # a copy, because scripts must not see what tests change later
        # Newer versions of Ray require a cluster's token; older ones ignore both variables.
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scripts")
        self._thread.submit(int).result()  # it starts now, so that no test seems to have left it behind

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._made.name))

    def run(
        self, *command: str, connected: bool = False, folder: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program to its end. With `connected`, it uses the scripts' cluster and starts none of its
        own."""
        environment = {**self._environment, **extra}
        if self._forks is not None:
            self._forks.start()
        if connected:
            environment |= {"RAY_ADDRESS": self._address, **self._token}
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=environment,
            cwd=folder,
        )

    @cached_property
    def _address(self) -> str:
        log = self.folder() / "cluster.log"
        with log.open("w", encoding="utf-8") as errors:
            self._cluster = subprocess.Popen(
                [sys.executable, "-c", CLUSTER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**self._environment, **self._token},
            )
        assert self._cluster.stdout is not None
        for line in self._cluster.stdout:
            if line.startswith("ADDRESS "):
                return line.split()[1]
        raise RuntimeError(f"the scripts' cluster did not come up:\n{log.read_text(encoding='utf-8')}")

    def outcome(self, item: pytest.Item) -> Any:
        """Return what the `run` of this test's mark returns, or raise its error."""
        mark = item.get_closest_marker("script")
        assert mark is not None
        parameters = getattr(item, "callspec", None)
        named = parameters.params if parameters is not None else {}
        return self._thread.submit(mark.kwargs["run"], self, *mark.args, **named).result()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.communicate()  # it ends when its input ends
        self._thread.shutdown()
        self._made.cleanup()

"""Run the scripts that tests check (pages, examples, benchmarks) in the background, at a low priority.

A test names its script in a mark, and gets a function that returns the script's outcome:

    @pytest.mark.script("quickstart.py", run=run)   # run(background, "quickstart.py"), and the test's own parameters
    def test_quickstart(outcome):
        assert "done" in outcome()

Most other tests spend more time waiting for processes than computing. So one script at a time can run during them. When only
tests of scripts are left (they come last), two scripts run at a time.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.forked_workers import ForkServer

__all__ = ["Background", "Lane", "turn"]

# If both need a core, scripts get a ninth of what the tests get, which is enough for Ray's own deadlines.
BEHIND = ("nice", "-n", "10")
# A script takes long while tests compute. If it hangs, its test detects that, because pytest gives it a limit of its
# own.
LIMIT_S = 7200 if os.environ.get("RAYSGD_SOAK") else 900
# A cluster for all scripts that do not need their own, because starting one takes longer than most scripts.
CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
print("ADDRESS", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


class Background:
    """Runs scripts at a low priority. Owns their folder and their cluster."""

    def __init__(self, forks: ForkServer | None) -> None:
        self._forks = forks
        self._made = tempfile.TemporaryDirectory(prefix="scripts-")
        self._cluster: subprocess.Popen[str] | None = None
        self._environment = dict(os.environ)  # a copy, because scripts must not see what tests change later
        # Newer versions of Ray require a cluster's token; older ones ignore both variables.
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._one_at_a_time = threading.Lock()

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
            with self._one_at_a_time:
                environment |= {"RAY_ADDRESS": self._address, **self._token}
        return subprocess.run(
            [*BEHIND, sys.executable, *command],
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
                [*BEHIND, sys.executable, "-c", CLUSTER],
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

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.communicate()  # it ends when its input ends
        self._made.cleanup()


class Lane:
    """Runs the jobs of a session, in the order of their tests. Owns their futures, and one or two threads."""

    def __init__(self, items: list[pytest.Item], background: Background) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outcomes: dict[str, Future[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        for item in items:
            mark = item.get_closest_marker("script")
            if mark is not None:
                self._add(item, mark, background)

    def _add(self, item: pytest.Item, mark: pytest.Mark, background: Background) -> None:
        run, arguments = mark.kwargs["run"], mark.args
        parameters = getattr(item, "callspec", None)
        named = parameters.params if parameters is not None else {}
        self._outcomes[item.nodeid] = future = Future()  # type: Future[Any]
        self._waiting.append((future, lambda: run(background, *arguments, **named)))

    def widen(self, threads: int) -> None:
        """Run this many jobs at a time from now on."""
        while self._waiting and len(self._threads) < threads:
            self._threads.append(threading.Thread(target=self._work, name="scripts", daemon=True))
            self._threads[-1].start()

    def outcome(self, item: pytest.Item) -> Any:
        """Return what the job returned, or raise its error."""
        self.widen(2)
        return self._outcomes[item.nodeid].result()

    def close(self) -> None:
        """Drop the jobs that have not begun."""
        self._waiting.clear()
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """Run jobs until none is left. The thread stays until `close`, because Linux would then count the processes
        that it started as another thread's, and the guard in `tests/guards.py` recognizes them by their thread."""
        while self._waiting:
            try:
                future, job = self._waiting.popleft()
            except IndexError:  # the other thread has taken the last job
                break
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        self._closing.wait()


def turn(item: pytest.Item) -> tuple[bool, bool]:
    """Return the key that sorts tests: tests of scripts come last, and of these, the ones with faults, because less
    runs at the same time then."""
    script = item.get_closest_marker("script") is not None
    return script, script and item.get_closest_marker("elastic") is not None

"""Simulate two hosts on one machine, and cut the connection between them in the middle of an epoch.

    sudo -E python tests/network/cut_link.py

Needs Linux, root, and `ip` (iproute2). Each host is a network namespace with a Ray node of one CPU in it; a
pair of virtual interfaces joins them. A trainer with two workers runs on the first host. When its second
epoch is well under way, the interface of the second host is taken down: no socket is reset, the other side
just stops sending. Then the first host must continue alone and in place, within little more than
`hang_timeout_s`, and no sample may be lost or used twice.

Prints one JSON document: seconds from the cut to the next step, the trainer's recoveries, and the samples of
each epoch. Namespaces and processes are always removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "examples" / "benchmarks"
HANG_TIMEOUT_S = 14.0
LIMIT_S = 150.0
STEPS_BEFORE_CUT = 60
PORT = 6399


class Host:
    """One network namespace. Runs commands in it, each in its own session, and ends them all."""

    def __init__(self, name: str, address: str, folder: Path, token: str) -> None:
        self.name, self.address = name, address
        folder.mkdir()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
            "RAY_TMPDIR": str(folder),
            # Newer versions of Ray require a cluster's token; older ones ignore both variables.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth-raysgd",
        }
        self._running: list[subprocess.Popen[str]] = []
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")

    def start(self, *command: str, **extra: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**self._environment, **extra},
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def close(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for process_id in ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process_id), signal.SIGKILL)
        ip("netns", "del", self.name)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return what this machine lacks for this test, "" if nothing."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the ip command (iproute2)"
    name = f"raysgd-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "eth-raysgd", "type", "veth", "peer", "name", "peer-raysgd")
        finally:
            ip("netns", "del", name)
    except OSError as error:
        return f"network namespaces are not allowed here ({error})"
    return ""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Connect two hosts with a pair of virtual interfaces (veth), one in each."""
    token = secrets.token_hex(32)  # only for this cluster
    with contextlib.ExitStack() as stack:
        hosts = []
        for letter, address in [("a", "10.231.77.1"), ("b", "10.231.77.2")]:
            host = Host(f"raysgd-{letter}-{os.getpid()}", address, folder / letter, token)
            stack.callback(host.close)
            hosts.append(host)
        first, second = hosts
        pair = ("eth-raysgd", "type", "veth", "peer", "name", "eth-raysgd", "netns", second.name)
        ip("-n", first.name, "link", "add", *pair)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth-raysgd")
            ip("-n", host.name, "link", "set", "eth-raysgd", "up")
        yield first, second


def start_ray(first: Host, second: Host) -> None:
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1")
    head = ("--head", f"--port={PORT}", "--include-dashboard=false")
    first.start(*ray, *head, f"--node-ip-address={first.address}")
    time.sleep(5)
    second.start(*ray, f"--address={first.address}:{PORT}", f"--node-ip-address={second.address}")


def run() -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import traces  # the benchmarks' module that records when each process makes its steps

    with tempfile.TemporaryDirectory(prefix="cut-") as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        with two_hosts(folder) as (first, second):
            start_ray(first, second)
            driver = first.start(
                sys.executable,
                str(Path(__file__).with_name("driver.py")),
                RAY_ADDRESS=f"{first.address}:{PORT}",
                TRACE=str(folder / "steps"),
                HANG_TIMEOUT_S=str(HANG_TIMEOUT_S),
            )
            traces.wait_for_steps(
                folder / "steps",
                rank=1,
                epoch=1,
                count=STEPS_BEFORE_CUT,
                limit_s=LIMIT_S,
                runs=lambda: driver.poll() is None,
            )
            cut_at = time.monotonic()
            ip("-n", second.name, "link", "set", "eth-raysgd", "down")
            output, _ = driver.communicate(timeout=LIMIT_S)
            facts = [line for line in output.splitlines() if line.startswith("{")]
            if driver.returncode or not facts:
                raise RuntimeError(f"the trainer did not survive the cut (status {driver.returncode}):\n{output}")
            # One or two steps may have been running at the cut, so only the gap counts.
            steps = [step for step in traces.read(folder / "steps") if step.at >= cut_at - 0.1]
            gap_s = round(traces.longest_gap(steps, within_epochs=True), 2)
            return {"cut_to_next_step_s": gap_s, "hang_timeout_s": HANG_TIMEOUT_S, **json.loads(facts[-1])}


if __name__ == "__main__":
    lacking = why_not()
    if lacking:
        sys.exit(lacking)
    print(json.dumps(run(), indent=1))

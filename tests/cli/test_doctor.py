"""`raysgd doctor`: this machine, and what it says about broken ones. `tests/hosts` runs it on a cluster."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from raysgd.cli import doctor
from raysgd.cli.doctor import FEWEST_FILES, LEAST_SHARED, Runner, judge, try_folder, try_import, try_ports
from raysgd.cli.printing import Finding

REQUIRED = metadata.requires("raysgd") or []
# Without the packages whose imports take long, and with few open files.
QUICK = """
import resource, raysgd.cli.doctor as doctor
doctor.IMPORTS = {"torch": doctor.IMPORTS["torch"]}
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2000))
doctor.command()
"""


def machine(**facts: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "versions": {"Python": "3.11.7", "ray": "2.60.0", "torch": metadata.version("torch")},
        "broken": {},
        "cpus": 2,
        "gpus": 0,
        "listed_gpus": 0,
        "name": "host-a",
        "name_at": ["10.0.0.1"],
        "address": "10.0.0.1",
        "interface": "eth0",
        "chosen": False,
        "open_files": FEWEST_FILES,
        "shared_free": LEAST_SHARED,
    }
    return {**usual, **facts}


def only(found: Any) -> Finding:
    """Return the one finding, which says what to do."""
    (finding,) = found
    assert finding.todo
    return finding


def test_a_machine_with_too_few_open_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUICK, "--folder", str(tmp_path)]
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as short:  # paths of sockets are limited
        alone = {**os.environ, "RAY_ADDRESS": "local", "TMPDIR": short}  # without a cluster of somebody else
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 1 and done.stderr == "Error: 1 check failed\n", done.stdout + done.stderr
    failure, todo = (line for line in done.stdout.splitlines() if not line.startswith("ok"))
    assert failure == "FAIL  open files  this machine: 2,000 at most, and 4,096 are needed"
    assert todo.strip().startswith("-> Before Ray starts: `ulimit -Hn 65536`")
    assert f"torch {metadata.version('torch')}" in done.stdout and f"ok    folder      {tmp_path}: " in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_package_whose_installation_was_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "IMPORTS", {"torch": "print(0)"})
    assert doctor.describe("127.0.0.1")["versions"]["torch"] == metadata.version("torch")


def test_single_machines() -> None:
    assert not list(judge({"a": machine()}, REQUIRED))
    old = machine(versions={"Python": "3.11.7", "torch": "2.1.0"})
    found = only(judge({"a": old}, ["torch>=2.10; extra == 'torch'"]))
    assert found.text == "a: torch 2.1.0, and raysgd needs >=2.10" and found.todo.endswith("pip install 'torch>=2.10'")
    found = only(judge({"a": machine(shared_free=64 << 20)}, REQUIRED))
    assert found.text == "a: 64 MiB are free, and 256 are needed" and "--shm-size" in found.todo
    found = only(judge({"a": machine(listed_gpus=2)}, REQUIRED))
    assert found.text == "a: nvidia-smi lists 2 GPUs, and torch sees 0" and "fits the driver" in found.todo


def test_machines_that_differ() -> None:
    newer = machine(versions={**machine()["versions"], "ray": "99.1"})
    found = only(judge({"a": machine(), "b": newer}, []))
    assert found.text == "ray differs: 2.60.0 on a, 99.1 on b" and found.fails


def test_a_package_whose_import_ends_the_process() -> None:
    error = try_import("import os; os.abort()")
    found = only(judge({"a": machine(broken={"horovod": error})}, []))
    assert found.text == "a: horovod cannot be imported: its import ends the process with -6" and found.fails
    assert try_import("print('welcome'); print(3)") == "3"


def test_names_that_do_not_matter_to_torch() -> None:
    """Ports need not be opened because a name is docker's bridge: raysgd chooses the interface."""
    unknown = machine(name_at=[])
    assert not only(judge({"a": unknown}, [])).fails
    horovod = machine(name_at=[], versions={**machine()["versions"], "horovod": "0.28.1"})
    assert only(judge({"a": horovod}, [])).fails
    bridged = [machine(name_at=["172.30.0.1"], address=f"10.0.0.{number}") for number in (1, 2)]
    first, second = judge({"a": bridged[0], "b": bridged[1]}, [])
    assert "resolves to 172.30.0.1, as that of another node does" in first.text and not first.fails
    assert second.todo == "Let it resolve to 10.0.0.2 there, in /etc/hosts or DNS"
    assert not list(judge({"a": bridged[0]}, [])), "one machine alone"


class Elsewhere(Runner):
    """A node that the network cuts off, or that has another disk at the same place."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        raise {"connect": TimeoutError("timed out"), "see": FileNotFoundError()}[function.__name__]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two nodes without Ray, of which `b` is elsewhere."""

    def ask(nodes: dict[str, Runner], _: float, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, runner in nodes.items():
            try:
                found[name] = 7 if function.__name__ == "listen" else runner.run(function, *arguments)
            except (OSError, KeyError) as error:
                found[name] = error
        return found

    monkeypatch.setattr("raysgd.cli.doctor.ask_nodes", ask)
    monkeypatch.setattr("raysgd.cli.doctor.connect", connect)
    return {"a": Runner(), "b": Elsewhere()}


def connect(host: str, port: int) -> None:
    """Succeed."""


def test_ports(nodes: dict[str, Any]) -> None:
    found = only(try_ports({"a": machine()}, nodes))
    assert found.text == "from b to a at 10.0.0.1 (eth0): timed out" and "Let the firewall pass" in found.todo
    found = only(try_ports({"a": machine(interface="docker0", chosen=True)}, nodes))
    assert found.todo.startswith("GLOO_SOCKET_IFNAME is docker0 there") and "firewall" not in found.todo


def test_folders(nodes: dict[str, Any], tmp_path: Path) -> None:
    first, second = try_folder(str(tmp_path), nodes)
    assert first.text == f"what a wrote to {tmp_path} is not seen by b" and "Mount the same" in first.todo
    assert second.text.startswith(f"b cannot write to {tmp_path}: ") and not list(tmp_path.iterdir())

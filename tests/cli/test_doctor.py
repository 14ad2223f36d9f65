"""`raysgd doctor`: a healthy machine and cluster, and what it says about broken ones."""

import ctypes
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raysgd.cli import doctor, main
from raysgd.cli.doctor import Connection
from raysgd.cli.findings import Finding
from raysgd.cli.machine import Machine, Probe, gloo_address
from raysgd.workers.survey import Node
from tests.background import Background

CHECKS = ["cluster", "versions", "GPUs", "NCCL", "gloo", "ports", "clocks", "open files", "shared memory", "memory"]
QUICK = "import raysgd.cli.machine as machine; machine.PACKAGES = ('raysgd', 'ray'); from raysgd.cli import main; main(['doctor'])"
SO_ATTACH_FILTER = 26


def node(probe: Probe, address: str = "127.0.0.1") -> Node:
    return Node(address, 0.0, lambda limit_s, method, *given: getattr(probe, method)(*given))


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This machine, without the packages whose imports take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysgd.cli.machine.PACKAGES", ("raysgd", "ray", "torch"))
        return Probe().machine()


@pytest.fixture
def probes() -> Iterator[list[Probe]]:
    made: list[Probe] = []
    yield made
    for each in made:
        each.close()


def failed(found: Any) -> Finding:
    """Return the one finding, which is a failure."""
    (finding,) = found
    assert finding.mark == "FAIL" and finding.todo
    return finding


# -- healthy ------------------------------------------------------------------------------------------


def test_a_healthy_machine(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("ok ")]
    assert [line[6:20].strip() for line in lines] == [*CHECKS, "tokens", "folder"]
    assert f"torch {metadata.version('torch')}" in lines[1] and lines[4].endswith("available")
    assert not list(tmp_path.iterdir())


CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
import raysgd.cli.machine as machine
from raysgd.cli import main
main(["doctor", "--folder", sys.argv[1]], standalone_mode=False)
import ray
print("USED", ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"])
ray.shutdown()
cluster.shutdown()
"""


def two_nodes(background: Background) -> subprocess.CompletedProcess[str]:
    return background.run("-c", CLUSTER, str(background.folder()))


@pytest.mark.slow
@pytest.mark.script(run=two_nodes)
def test_a_healthy_cluster_of_two_nodes(outcome: Callable[[], Any]) -> None:
    done = outcome()
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 2 node(s)" in done.stdout and "written and read by every node" in done.stdout
    assert "FAIL" not in done.stdout and "USED 0.0" in done.stdout
    (clocks,) = (line for line in done.stdout.splitlines() if " clocks " in line)
    assert 0 <= float(clocks.split()[-3]) < 1000


# -- broken -------------------------------------------------------------------------------------------


def without_token(background: Background) -> subprocess.CompletedProcess[str]:
    forget = "import os; del os.environ['RAY_AUTH_TOKEN']; "
    return background.run("-c", forget + QUICK, connected=True, HOME=tempfile.mkdtemp(dir=background.folder()))


@pytest.mark.script(run=without_token)
def test_a_cluster_that_demands_a_token(outcome: Callable[[], Any]) -> None:
    done = outcome()
    assert done.returncode == 1
    assert "FAIL  cluster" in done.stdout and "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in done.stdout
    assert "FAIL  tokens         RAY_AUTH_MODE=token, and there is no token" in done.stdout
    assert "ray get-auth-token --generate" in done.stdout


def test_tokens(tmp_path: Path) -> None:
    assert doctor.token_source({}, tmp_path) == ("", "")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32), encoding="utf-8")
    assert doctor.token_source({}, tmp_path) == (str(tmp_path / ".ray" / "auth_token"), "")
    source, wrong = doctor.token_source({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nothing")}, tmp_path)
    assert not source and "No such file" in wrong
    assert "names no token" in failed(doctor.tokens("", source, wrong, 1)).text
    assert not list(doctor.tokens("", "", "", 1))
    (advice,) = doctor.tokens("", "", "", 3)
    assert advice.mark == "note" and "run code on the cluster" in advice.text


def test_too_few_open_files() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2000)); "
    done = subprocess.run([sys.executable, "-c", few + QUICK], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "FAIL  open files     this machine: 512, can be raised to 2,000; at least 1,024 and 4,096 are needed"
        in done.stdout
    )
    assert "-> Raise it before Ray starts: with `ulimit -n 65536`" in done.stdout


def test_versions(machine: Machine) -> None:
    required = metadata.requires("raysgd") or []
    assert not list(doctor.versions({"a": machine}, required))
    old = replace(machine, versions={**machine.versions, "torch": "2.1.0"})
    found = failed(doctor.versions({"a": old}, required))
    assert found.text == "a: torch 2.1.0 (needs >=2.8)" and found.todo.endswith("pip install 'torch>=2.8'")
    newer = replace(machine, versions={**machine.versions, "ray": "99.1"})
    found = failed(doctor.versions({"a": machine, "b": newer}, required))
    assert found.text == f"ray differs: {metadata.version('ray')} on a, 99.1 on b"
    assert "differs" in failed(doctor.versions({"a": machine, "b": replace(machine, python="3.10.2")}, required)).text


def test_a_package_whose_import_ends_the_process(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("raysgd.cli.machine.PACKAGES", ("raysgd",))
    monkeypatch.setattr("raysgd.cli.machine._versions", lambda: [("horovod", "0.28.1"), ("torch", "2.9")])
    monkeypatch.setattr("raysgd.cli.machine.IMPORTS", {"torch": "print('\\nFOUND {}')", "horovod": "import horovod"})
    found = Probe().machine()
    assert found.broken == {"horovod": "its process ended with status -6"}
    assert "horovod cannot be imported" in failed(doctor.versions({"a": found}, ["horovod"])).text


def test_a_host_name_that_resolves_to_nothing(machine: Machine, probes: list[Probe]) -> None:
    class Elsewhere(Probe):
        """Listens on the loopback address of another machine."""

        def listen(self, host: str) -> tuple[int, str]:
            port, secret = super().listen(host)
            self.close()
            return port, secret

    assert gloo_address("no-such-host.invalid") == "127.0.0.1"
    probes += [Probe(), Elsewhere()]
    machines = {"a": machine, "b": replace(machine, gloo_address=gloo_address("no-such-host.invalid"))}
    machines["a"] = replace(machine, gloo_address=machines["b"].gloo_address)
    tried = list(doctor._connections(machines, {"a": node(probes[0]), "b": node(probes[1])}))
    assert [(each.source, each.target) for each in tried if each.error] == [("a", "b"), ("b", "b")]
    (found, own) = doctor.connections(tried)
    assert found.mark == "FAIL" and "The host name of b resolves to the loopback address, or to none" in found.todo
    assert "Connection refused" in found.text and "its own address" in own.todo


def test_a_port_that_a_firewall_blocks(machine: Machine, probes: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocked(Probe):
        """The kernel drops whatever arrives at its sockets."""

        def listen(self, host: str) -> tuple[int, str]:
            answer = super().listen(host)
            drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)
            buffer = ctypes.create_string_buffer(drop_all)
            program = struct.pack("HL", 1, ctypes.addressof(buffer))
            self._listening[-1].setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            return answer

    monkeypatch.setattr(doctor, "CONNECT_S", 0.3)
    probes += [Probe(), Blocked()]
    machines = {"a": machine, "b": machine}
    tried = list(doctor._connections(machines, {"a": node(probes[0], "127.0.0.2"), "b": node(probes[1], "127.0.0.3")}))
    assert {(each.source, each.target, bool(each.error)) for each in tried} == {
        ("a", "a", False),
        ("b", "a", False),
        ("a", "b", True),
        ("b", "b", True),
    }
    remote = Connection("a", "b", "10.0.0.7", next(each.error for each in tried if each.error))
    found = failed(doctor.connections([remote]))
    assert "timed out" in found.text and "Let the firewall pass all TCP ports" in found.todo


def test_another_program_at_the_port(probes: list[Probe]) -> None:
    probes.append(Probe())
    port, secret = probes[0].listen("127.0.0.1")
    assert probes[0].connect("127.0.0.1", port, secret, 1.0) == ""
    assert probes[0].connect("127.0.0.1", port, "0" * len(secret), 1.0) == "another program answered there"


def test_a_clock_that_is_ahead() -> None:
    class Ahead(Probe):
        def clock(self) -> float:
            return time.time() + 90

    offsets = {"a": doctor._offset(node(Probe())), "b": doctor._offset(node(Ahead()))}
    assert abs(offsets["a"][0]) < 0.5
    assert failed(doctor.clocks(offsets)).text == "b: 90.0 s ahead of this machine"
    slow = {"c": (3.0, 2.9)}  # the answer took so long that nothing is known
    assert not list(doctor.clocks(slow))


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Probe):
        """A machine on which another disk is mounted at the same place."""

        def write(self, folder: str, name: str, content: str) -> str:
            return super().write(str(tmp_path / "other"), name, content)

        def read(self, folder: str, name: str, content: str) -> str:
            return super().read(str(tmp_path / "other"), name, content)

    def found(nodes: Mapping[str, Node], folder: str) -> list[Finding]:
        return list(doctor.folder_findings(folder, *doctor._tried_folder(folder, nodes)))

    monkeypatch.setattr("raysgd.cli.machine.SEEN_WITHIN_S", 0.2)
    (tmp_path / "other").mkdir()
    (tmp_path / "mine").mkdir()
    mine = str(tmp_path / "mine")
    assert not found({"a": node(Probe()), "b": node(Probe())}, mine)
    assert not os.listdir(mine)
    first, second = found({"a": node(Probe()), "b": node(Elsewhere())}, mine)
    assert "a does not see what b wrote" in first.text + second.text and "Mount the same file system" in first.todo
    assert "cannot write to it" in failed(found({"a": node(Probe())}, "/proc")).text
    assert "cannot write to it" in failed(found({"a": node(Probe())}, str(tmp_path / "nothing"))).text


def test_containers(machine: Machine) -> None:
    assert not list(doctor.limits({"a": replace(machine, open_files=(resource.RLIM_INFINITY, resource.RLIM_INFINITY))}))
    docker = replace(machine, shared_bytes=(64 << 20, 64 << 20))
    assert "--shm-size" in failed(doctor.limits({"a": docker})).todo
    full = replace(machine, memory_bytes=(8 << 30, 200 << 20))
    assert failed(doctor.limits({"a": full})).text.startswith("a: 0.195 GiB of 8 GiB is free")


def test_gpus_that_torch_does_not_see(machine: Machine) -> None:
    cpu_build = replace(machine, listed_gpus=2, gpus=(), cuda=None)
    found = failed(doctor.devices({"a": cpu_build}, {}))
    assert found.text == "a: nvidia-smi lists 2, torch sees 0, and is built without CUDA"
    both = replace(machine, listed_gpus=2, gpus=("H100", "H100"), cuda="12.8", nccl=True)
    assert not list(doctor.devices({"a": both}, {"a": 2.0}))
    assert "--num-gpus=2" in failed(doctor.devices({"a": both}, {"a": 1.0})).todo
    assert failed(doctor.devices({"a": replace(both, nccl=False)}, {"a": 2.0})).check == "NCCL"

"""Joining an existing cluster is announced, and takes seconds to succeed or to fail with what to do."""

import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd import ClusterError, ConfigError, ResourceError
from raysgd.config import WorkerResources
from raysgd.workers.cluster import connecting, foreign


@pytest.fixture
def silent_port() -> Iterator[str]:
    """Return the address of a program that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let this process look unconnected, and note the calls of `ray.init`."""
    calls: list[dict[str, Any]] = []

    def note(**arguments: Any) -> Any:
        calls.append(arguments)
        return SimpleNamespace(address_info={})

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", note)
    monkeypatch.setattr(foreign, "use_token_if_available", lambda: None)
    return calls


def found(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(foreign, "address_of_this_machine", lambda: address)


def test_something_else_that_listens_at_the_stored_address(
    monkeypatch: pytest.MonkeyPatch, init: list[Any], silent_port: str, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, silent_port)
    with pytest.raises(ClusterError) as caught:
        connecting.ensure_cluster()
    text = str(caught.value)
    assert f"joining the Ray cluster at {silent_port}, found on this machine, failed" in text
    for part in ("RAY_ADDRESS=local", "ray stop", "(GCS)"):
        assert part in text, text
    assert f"joining the Ray cluster at {silent_port}" in caplog.text
    assert init == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("token", "it requires a token, and this process has none or another one. Set RAY_AUTH_MODE=token"),
        ("no node", "none of its nodes is on this machine"),
        ("RuntimeError: Version mismatch", "failed: RuntimeError: Version mismatch"),
    ],
)
def test_what_the_probe_finds_becomes_advice(
    monkeypatch: pytest.MonkeyPatch, init: list[Any], answer: str, says: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(foreign, "probe_gcs", lambda address, limit_s: answer)
    with pytest.raises(ClusterError) as caught:
        connecting.ensure_cluster()
    assert says in str(caught.value)
    assert "10.0.0.1:6379, which RAY_ADDRESS names" in str(caught.value)
    assert init == []


def test_a_healthy_cluster_is_joined_with_an_announcement(
    monkeypatch: pytest.MonkeyPatch, init: list[Any], silent_port: str, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, silent_port)
    monkeypatch.setattr(foreign, "probe_gcs", lambda address, limit_s: "ok")
    with caplog.at_level(logging.WARNING, "raysgd"):
        connecting.ensure_cluster()
    assert [call["address"] for call in init] == [silent_port]
    assert f"joining the Ray cluster at {silent_port}, which was found on this machine" in caplog.text
    assert "RAY_ADDRESS=local" in caplog.text


def test_a_lasting_cluster_without_its_gcs_is_an_error(monkeypatch: pytest.MonkeyPatch, init: list[Any]) -> None:
    """Ray's own client would wait for minutes, and end the process."""
    found(monkeypatch, "local")
    monkeypatch.setattr(connecting.lasting_cluster, "locked", nullcontext)
    monkeypatch.setattr(connecting.lasting_cluster, "address", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(foreign, "probe_gcs", lambda address, limit_s: "it did not answer within 60 s")
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379, found on this machine, failed: it did not answer"):
        connecting.join_running()
    assert init == []


@pytest.mark.parametrize("lasting", [False, True])
def test_a_cluster_of_this_machine_is_asked_with_its_token(
    lasting: bool, monkeypatch: pytest.MonkeyPatch, init: list[Any], silent_port: str
) -> None:
    found(monkeypatch, "local" if lasting else silent_port)
    monkeypatch.setattr(connecting, "require_ray", lambda: "session")
    monkeypatch.setattr(connecting.lasting_cluster, "locked", nullcontext)
    monkeypatch.setattr(connecting.lasting_cluster, "address", lambda: silent_port)
    calls = []

    def answer(address: str, limit_s: float) -> str:
        calls.append(address)
        return "ok"

    monkeypatch.setattr(foreign, "use_token_if_available", lambda: calls.append("token"))
    monkeypatch.setattr(foreign, "probe_gcs", answer)
    assert connecting.join_running() == silent_port
    assert calls[:2] == ["token", silent_port]
    assert len(init) == 1


def test_an_error_of_ray_while_joining_says_what_to_do(monkeypatch: pytest.MonkeyPatch, init: list[Any]) -> None:
    def refuse(**arguments: Any) -> None:
        raise RuntimeError("the versions differ")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(foreign, "probe_gcs", lambda address, limit_s: "ok")
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ClusterError, match=r"RuntimeError: the versions differ\).*RAY_ADDRESS=local") as caught:
        connecting.ensure_cluster()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_ray_while_starting_says_what_to_do(monkeypatch: pytest.MonkeyPatch, init: list[Any]) -> None:
    def slow(**arguments: Any) -> None:
        raise RuntimeError("The current node timed out during startup")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("ray.init", slow)
    with pytest.raises(ClusterError) as caught:
        connecting.ensure_cluster()
    for part in ("did not start on this machine", "timed out during startup", "an overloaded machine", "ray.init(...)"):
        assert part in str(caught.value)


def test_a_wrong_switch_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch, init: list[Any]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAYSGD_FORK_WORKERS", "maybe")
    with pytest.raises(ConfigError, match="RAYSGD_FORK_WORKERS is 'maybe'; it must be 0 or 1"):
        connecting.ensure_cluster()
    assert init == []


def test_no_cluster_is_started_without_the_gpus_that_workers_need(
    monkeypatch: pytest.MonkeyPatch, init: list[Any]
) -> None:
    found(monkeypatch, "")
    monkeypatch.setattr(foreign, "gpus_here", lambda: 0)
    with pytest.raises(
        ResourceError, match=r"each worker needs 1 GPU, this machine has 0, .*pass use_gpu=False, or .*RAY_ADDRESS"
    ):
        connecting.ensure_cluster(WorkerResources(gpus=1))
    assert init == []


@pytest.mark.parametrize("others", [[], ["10.0.0.1:6379"]])
def test_a_cluster_beside_that_of_another_script_is_announced(
    others: list[str], monkeypatch: pytest.MonkeyPatch, init: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, "")
    monkeypatch.setattr(foreign, "find_clusters", lambda: others)
    monkeypatch.setattr(connecting, "start_fork_server", lambda: "")
    monkeypatch.setattr(connecting, "require_ray", lambda: "session")
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    connecting.ensure_cluster()
    (message,) = caplog.messages
    assert len(init) == 1 and "4 CPUs" in message
    assert ("10.0.0.1:6379" in message and "ray start --head" in message) == bool(others)


def test_a_submitted_job_joins_its_cluster_without_a_probe(monkeypatch: pytest.MonkeyPatch, init: list[Any]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setattr(foreign, "probe_gcs", lambda address, limit_s: pytest.fail("probed"))
    connecting.ensure_cluster()
    assert len(init) == 1


def test_the_probe_of_a_real_cluster(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    assert foreign.probe_gcs(address, 60) == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    assert foreign.probe_gcs(address, 60) == "token"


WATCHES = """
import os, time
os.write(1, b"a warning ")
until = time.monotonic() + 0.5
while time.monotonic() < until:
    if os.lseek(1, 0, os.SEEK_CUR) != 10:
        os._exit(1)
os.write(1, b"PROBE others")
"""


def test_reading_a_probe_does_not_move_the_place_where_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it overwrites what it has written, and its answer is a part of a word."""
    monkeypatch.setattr(foreign, "PROBE", WATCHES)
    assert foreign.probe_gcs("nowhere", 60) == "others"

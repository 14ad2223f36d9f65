"""Horovod's ranks and rendezvous server, its errors, its arguments, and the error when it is not installed."""

import http.client
import importlib.util
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from raysgd import ConfigError, TorchTrainer, TrainingOptions
from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.horovod import backend, foreign
from raysgd.horovod.arguments import HorovodArguments, check_installed
from raysgd.horovod.backend import HorovodFunctionBackend
from raysgd.horovod.rendezvous import HorovodRendezvous, end_rendezvous, rank_variables, set_environment
from raysgd.torch.group.sockets import Connections
from raysgd.train.backends import HorovodConfig, parse_backend
from tests.faults import LedgerOperator


def test_ranks_on_nodes_with_different_numbers_of_workers() -> None:
    """A cross rank counts the nodes that have a worker with this local rank."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    found = rank_variables(assign_ranks(["c", "b", "c", "a", "a"]))
    assert [tuple(rank[f"HOROVOD_{name}"] for name in names) for rank in found] == [
        ("0", "5", "0", "2", "0", "3", "node-0"),
        ("1", "5", "0", "1", "1", "3", "node-1"),
        ("2", "5", "1", "2", "0", "2", "node-0"),
        ("3", "5", "0", "2", "2", "3", "node-2"),
        ("4", "5", "1", "2", "1", "2", "node-2"),
    ]


def test_a_new_environment_replaces_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"}
    set_environment({**rank_variables([RankInfo(1, 2)])[0], **address}, interface="eth7")
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_GLOO_IFACE"]) == ("1", "eth7")
    set_environment({})
    assert not {"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} & set(os.environ)
    assert os.environ["HOROVOD_CONTROLLER"] == "gloo"


@pytest.fixture
def internal_error(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Horovod's type of error, also if Horovod is not installed."""
    kind = type("HorovodInternalError", (RuntimeError,), {})
    monkeypatch.setitem(sys.modules, "horovod.common.exceptions", types.SimpleNamespace(HorovodInternalError=kind))
    return kind


def test_errors_of_failed_peers_are_interruptions(internal_error: type[Exception]) -> None:
    peer_failed = internal_error("Horovod has been shut down. This was caused by an exception on one of the ranks")
    caused = ValueError("bad batch")
    caused.__context__ = peer_failed
    table: list[tuple[BaseException, bool]] = [
        (peer_failed, True),
        (caused, True),
        (ValueError("Horovod initialization failed. Please check log messages above"), True),
        (internal_error("Mismatched allreduce tensor shapes: One rank sent a tensor of shape [2]"), False),
        (ValueError("bad batch"), False),
        (RuntimeError("Horovod has been shut down"), False),
    ]
    assert [backend.is_interruption(error) for error, _ in table] == [expected for _, expected in table]


def test_a_host_whose_name_does_not_resolve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hvd.init()` would end the process with SIGSEGV."""
    begun: list[bool] = []
    basics = type("HorovodBasics", (), {"init": lambda self: begun.append(True)})
    monkeypatch.setattr(foreign, "basics", lambda: basics)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    backend.watch_init(Connections())
    with pytest.raises(ConfigError, match=r"its own name 'nowhere\.invalid' does not resolve .*/etc/hosts"):
        basics().init()
    assert not begun


def test_without_horovod_no_error_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.common.exceptions", raising=False)
    assert not backend.is_interruption(ValueError("Horovod initialization failed"))


def test_shutting_down_closes_the_connections_if_a_peer_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    done: list[bool] = []
    horovod = types.SimpleNamespace(shutdown=lambda: done.append(closed.wait(20)))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setattr(backend, "GRACE_S", 0.05)
    backend.shut_down(closed.set, limit_s=20)
    assert done == [True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compression": "fp8"}, "'none' or 'fp16'"),
        ({"op": "adasum"}, "'average' or 'sum'"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": "two"}, "groups"),
        ({"gradient_predivide_factor": 0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "cannot be used with op='sum'"),
        ({"sparse_as_dense": 1}, "True or False"),
        ({"process_set": 3}, "no argument 'process_set'; it takes backward_passes_per_step"),
        ("fp16", "must be a dict"),
    ],
)
def test_arguments_are_checked(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HorovodArguments.parse(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": TrainingOptions(parallel="fsdp")}, "full models"),
        ({"options": TrainingOptions(ddp_args={"bucket_cap_mb": 1})}, "horovod_args"),
        ({"options": TrainingOptions(comm_hook="fp16")}, "'compression': 'fp16'"),
        ({"options": TrainingOptions(sync_batchnorm=True)}, "SyncBatchNorm"),
        ({"options": TrainingOptions(parallel=None), "horovod_args": {"op": "sum"}}, "parallel=None"),
        ({"horovod_args": {"op": "max"}}, "'average' or 'sum'"),
        ({"backend": "gloo", "horovod_args": {}}, "for backend='horovod'"),
    ],
)
def test_options_that_cannot_be_combined(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"backend": "horovod", "num_workers": 2, "use_gpu": False, **given}
    with pytest.raises(ConfigError, match=message):
        TorchTrainer(training_operator_cls=LedgerOperator, **arguments)


def test_without_horovod_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name))
    instructions = r"make horovod.*tools/build_horovod\.py"
    with pytest.raises(ImportError, match=instructions):
        TorchTrainer(training_operator_cls=LedgerOperator, num_workers=2, use_gpu=False, backend="horovod")
    with pytest.raises(ImportError, match=instructions):
        parse_backend(HorovodConfig())


def test_horovod_for_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "horovod.torch", None)  # makes its import fail
    with pytest.raises(ImportError, match="does not work with the installed torch"):
        check_installed("torch")


@pytest.mark.horovod
def test_workers_of_a_node_see_each_others_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HorovodFunctionBackend(host="127.0.0.1", wait_s=1, use_gpu=True)
    plans = driver.plan(assign_ranks(["a", "a", "b"]), [{"gpus": "3"}, {"gpus": "7"}, {"gpus": "3"}])
    assert [plan["gpus"] for plan in plans] == ["3,7", "3,7", "3"]
    assert driver.plan([]) == []
    plain = HorovodFunctionBackend(host="127.0.0.1", wait_s=1)
    assert not plain.needs_offers and plain.plan(assign_ranks(["a"]))[0]["gpus"] is None
    plain.plan([])


# -- Horovod's server ------------------------------------------------------------------------------------------------


@pytest.fixture
def rendezvous() -> Iterator[HorovodRendezvous]:
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    yield rendezvous
    rendezvous.close()


@pytest.fixture
def environment(rendezvous: HorovodRendezvous) -> dict[str, str]:
    """The environment of rank 0, of two on one node. Rank 1 has published its address."""
    environment = rendezvous.open(assign_ranks(["a", "a"]))[0]
    assert asked(environment, "PUT", "global/1", b"address")[0] == 200
    return environment


@pytest.mark.horovod
def test_a_rendezvous_can_be_ended_and_replaced(rendezvous: HorovodRendezvous, environment: dict[str, str]) -> None:
    assert asked(environment, "GET", "global/1") == (200, b"address")
    assert asked(environment, "GET", "global/0")[0] == 404, "rank 0 has not published its address yet"
    end_rendezvous(environment)
    assert {asked(environment, "GET", f"global/{rank}")[0] for rank in (0, 1)} == {410}
    (again, _) = rendezvous.open(assign_ranks(["a", "b"]))
    assert again["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"
    assert asked(again, "GET", "global/1")[0] == 404
    with pytest.raises(ConnectionRefusedError):
        asked(environment, "GET", "global/0")
    end_rendezvous(environment)  # too late, because the server is closed
    assert rendezvous.open([]) == []


@pytest.mark.horovod
def test_when_all_ranks_have_finished_their_addresses_are_removed(environment: dict[str, str]) -> None:
    """A scope that ends while another one is half done does not keep the addresses of that one."""
    assert asked(environment, "PUT", "local_node-0/1", b"local address")[0] == 200
    for again in ("0", "0"):  # one rank repeats its request, because it did not get the response
        assert asked(environment, "DELETE", f"global/{again}")[0] == 200
    asked(environment, "DELETE", "local_node-0/0")
    assert asked(environment, "GET", "global/1") == (200, b"address")
    asked(environment, "DELETE", "global/1")
    assert asked(environment, "GET", "global/1")[0] == 404
    assert asked(environment, "GET", "local_node-0/1") == (200, b"local address")
    asked(environment, "DELETE", "local_node-0/1")
    assert asked(environment, "GET", "local_node-0/1")[0] == 404


@pytest.mark.horovod
def test_the_scope_of_a_set_of_processes_loses_only_a_ranks_own_address(environment: dict[str, str]) -> None:
    for rank in ("0", "1"):
        asked(environment, "PUT", f"set/{rank}", b"address")
    asked(environment, "DELETE", "set/0")
    assert [asked(environment, "GET", f"set/{rank}")[0] for rank in (0, 1)] == [404, 200]


@pytest.mark.horovod
def test_silent_clients_delay_neither_the_ranks_nor_the_end(
    rendezvous: HorovodRendezvous, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(100)]
        clients[0].sendall(b"GET /gl")
        assert asked(environment, "GET", "global/1") == (200, b"address")
        began = time.monotonic()
        rendezvous.close()
        assert time.monotonic() - began < 2.5, "Horovod's own limit for a silent client, 3 s, did not have to expire"
        assert clients[-1].recv(1) == b"", "the server closes the connections of silent clients"
    assert not caplog.records


@pytest.mark.horovod
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
@pytest.mark.parametrize("secret", ["", "0" * 32, "/"])
def test_without_the_secret_of_the_generation_nothing_is_served(
    environment: dict[str, str], method: str, secret: str
) -> None:
    """Such a client can be of an earlier generation, which had the same port."""
    where = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[0]
    theirs = {**environment, "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{where}/{secret}"}
    for path in ("global/1", "raysgd-over/1", "pyproject.toml"):
        assert asked(theirs, method, path, b"other" if method == "PUT" else b"") == (403, b"")
    end_rendezvous(theirs)
    assert asked(environment, "GET", "global/1") == (200, b"address")


@pytest.mark.horovod
@pytest.mark.parametrize(
    "what",
    [
        b"\xff" * 64,
        b"GET\r\n\r\n",
        b"PUT /%SECRET/global/1/2 HTTP/1.1\r\n\r\n",
        b"PUT /%SECRET/global/1 HTTP/1.1\r\n\r\n",
    ],
)
def test_invalid_requests_change_and_print_nothing(
    environment: dict[str, str], what: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    secret = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2].encode()
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(what.replace(b"%SECRET", secret))
        client.shutdown(socket.SHUT_WR)
        assert b" 200 " not in client.recv(4096)
    assert asked(environment, "GET", "global/1") == (200, b"address")
    assert capfd.readouterr().err == ""


def asked(environment: dict[str, str], method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """Return the response that Horovod's own client gets, which puts the port and its path after the address."""
    where, port = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    url = f"{where}:{port}/{path}"
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
    try:
        connection.request(method, url[url.index("/") :], body=content or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()

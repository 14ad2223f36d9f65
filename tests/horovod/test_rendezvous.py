"""Horovod's ranks and rendezvous server, its errors, its arguments, and the error when it is not installed."""

import contextlib
import http.client
import importlib.util
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from raysgd import ConfigError, TorchTrainer, TrainingOptions
from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.horovod import backend, rendezvous_server
from raysgd.horovod.arguments import HorovodArguments, check_installed
from raysgd.horovod.backend import HorovodFunctionBackend
from raysgd.horovod.rendezvous import HorovodRendezvous, end_rendezvous, rank_variables, set_environment
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
    horovod = types.SimpleNamespace(init=lambda: begun.append(True))
    monkeypatch.setitem(sys.modules, "horovod", types.SimpleNamespace(torch=horovod))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    with pytest.raises(ConfigError, match=r"its own name 'nowhere\.invalid' does not resolve .*/etc/hosts"):
        backend._init()
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


def test_a_rendezvous_can_be_ended_and_replaced() -> None:
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    first, _ = rendezvous.open(assign_ranks(["a", "b"]))
    assert asked(first, "GET", "global/0")[0] == 404, "no rank has published its address yet"
    end_rendezvous(first)
    assert asked(first, "GET", "global/0")[0] == 410
    (again, _) = rendezvous.open(assign_ranks(["a", "b"]))
    assert again["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"
    with pytest.raises(ConnectionRefusedError):
        asked(first, "GET", "global/0")
    end_rendezvous(first)  # too late, because the server is closed
    assert rendezvous.open([]) == []


def test_workers_of_a_node_see_each_others_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HorovodFunctionBackend(host="127.0.0.1", wait_s=1, use_gpu=True)
    plans = driver.plan(assign_ranks(["a", "a", "b"]), [{"gpus": "3"}, {"gpus": "7"}, {"gpus": "3"}])
    assert [plan["gpus"] for plan in plans] == ["3,7", "3,7", "3"]
    assert driver.plan([]) == []
    plain = HorovodFunctionBackend(host="127.0.0.1", wait_s=1)
    assert not plain.needs_offers and plain.plan(assign_ranks(["a"]))[0]["gpus"] is None
    plain.plan([])


def test_when_all_ranks_have_finished_their_addresses_are_removed() -> None:
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    environment = rendezvous.open(assign_ranks(["a", "b"]))[0]
    for rank in ("0", "1"):
        assert asked(environment, "PUT", f"global/{rank}", b"address")[0] == 200
    for again in ("0", "0"):  # one rank repeats its request, because it did not get the response
        assert asked(environment, "DELETE", f"global/{again}")[0] == 200
    assert asked(environment, "GET", "global/1") == (200, b"address")
    asked(environment, "DELETE", "global/1")
    assert asked(environment, "GET", "global/1")[0] == 404
    rendezvous.close()


# -- clients without the secret ------------------------------------------------------------------------


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment of rank 0. Rank 1 has published its address."""
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    environment = rendezvous.open(assign_ranks(["a", "b"]))[0]
    asked(environment, "PUT", "global/1", b"address")
    yield environment
    rendezvous.close()


@pytest.mark.parametrize("secret", ["", "/" + "0" * 32, "//"])
def test_without_the_secret_entries_cannot_be_read_or_changed(environment: dict[str, str], secret: str) -> None:
    where = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
    theirs = {**environment, "HOROVOD_GLOO_RENDEZVOUS_ADDR": where + secret}
    for method, path in (
        ("GET", "global/1"),
        ("PUT", "global/1"),
        ("PUT", "raysgd-over/1"),
        ("DELETE", "global/0"),
        ("DELETE", "global/1"),
    ):
        status, content = asked(theirs, method, path, b"evil" if method == "PUT" else b"")
        assert status >= 400 and content == b""
    assert asked(environment, "GET", "global/1") == (200, b"address")


def test_data_without_the_secret_is_not_stored(environment: dict[str, str]) -> None:
    """The server reads neither a large body nor an endless head."""
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))

    def send(head: bytes, count: int) -> None:
        with socket.create_connection(address, timeout=10) as client, contextlib.suppress(OSError):
            client.sendall(head)
            for _ in range(count):
                client.sendall(b"x" * (1 << 20))

    before = psutil.Process().memory_info().rss
    for _ in range(3):
        send(b"PUT /global/1 HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n", 100)
        send(b"GET /", 100)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert asked(environment, "GET", "global/1") == (200, b"address")


def test_a_rank_cannot_fill_the_drivers_memory(environment: dict[str, str]) -> None:
    with contextlib.suppress(ConnectionError):  # the server may close the connection before it has read all
        assert asked(environment, "PUT", "global/2", b"x" * (1 << 20))[0] == 413
    assert asked(environment, "GET", "global/2")[0] == 404


def test_300_silent_and_slow_clients_do_not_block_the_ranks(environment: dict[str, str]) -> None:
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    threads = threading.active_count()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(300)]
        for client in clients[::3]:
            with contextlib.suppress(OSError):
                client.sendall(b"GET /gl")
        for _ in range(3):
            assert asked(environment, "GET", "global/1") == (200, b"address")
        assert threading.active_count() <= threads + 1
        last = clients[-1]
        last.settimeout(60)
        assert last.recv(1) == b"", "the server closes the connections of silent clients"


def test_all_ranks_of_a_large_group_can_be_connected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "REQUEST_S", 60.0)
    ranks = 200
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    environment = rendezvous.open(assign_ranks([f"node-{rank}" for rank in range(ranks)]))[0]
    place, port = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(2 * ranks)
        ]
        for client in clients:
            client.sendall(f"PUT /{place.partition('/')[2]}/global/1 HTTP/1.1\r\nContent-Length: 1\r\n\r\n".encode())
        for client in clients:
            client.sendall(b"x")
        assert [client.recv(12) for client in clients] == [b"HTTP/1.0 200"] * (2 * ranks)
    rendezvous.close()


def test_connections_that_are_open_when_the_server_closes_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = HorovodRendezvous("127.0.0.1", wait_s=5)
    environment = rendezvous.open(assign_ranks(["a", "b"]))[0]
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    with socket.create_connection(address, timeout=10) as client:
        assert asked(environment, "GET", "global/1")[0] == 404, "the server has accepted both connections"
        rendezvous.close()
        assert client.recv(1) == b""
    assert not caplog.records


@pytest.mark.parametrize(
    "what",
    [
        b"\xff" * 64,
        b"\r\n\r\n",
        b"[" * 2000 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"PUT /%SECRET/global/1 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /%SECRET/global/1 HTTP/1.1\r\nContent-Length: " + b"9" * 3000 + b"\r\n\r\n",
        b"PUT /%SECRET/global/1 HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n",
        b"POST /%SECRET/global/1 HTTP/1.1\r\n\r\n",
        b"PUT /%SECRET/global/1/2/3 HTTP/1.1\r\n\r\n",
    ],
)
def test_invalid_requests_change_nothing(environment: dict[str, str], what: bytes) -> None:
    secret = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2].encode()
    address = ("127.0.0.1", int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(what.replace(b"%SECRET", secret))
        client.shutdown(socket.SHUT_WR)
        assert not client.recv(4096).startswith(b"HTTP/1.0 200")
    assert asked(environment, "GET", "global/1") == (200, b"address")


def asked(environment: dict[str, str], method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """Return the response that Horovod's own client gets, which puts the port and its path after the address."""
    where, port = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    url = f"{where}:{port}/{path}"
    target = url[url.index("/") :]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
    try:
        connection.request(method, target, body=content or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()

"""Where ranks sit in Horovod's words, which errors are whose, and how the library says that Horovod is missing."""

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
from raysgd.horovod import leaving
from raysgd.horovod.arguments import HorovodArguments, check_installed
from raysgd.horovod.function import HorovodMeeting
from raysgd.horovod.rendezvous import MeetingPlace, enter, interface_towards, places, say_over
from raysgd.train.backends import HorovodConfig, parse_backend
from tests.faults import LedgerOperator


def test_places_on_uneven_nodes() -> None:
    """A cross rank counts the nodes that have a worker of this local rank."""
    words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    given = places(assign_ranks(["a", "b", "a", "c", "c"]))
    assert [tuple(place[f"HOROVOD_{word}"] for word in words) for place in given] == [
        ("0", "5", "0", "2", "0", "3", "node-0"),
        ("1", "5", "0", "1", "1", "3", "node-1"),
        ("2", "5", "1", "2", "0", "2", "node-0"),
        ("3", "5", "0", "2", "2", "3", "node-2"),
        ("4", "5", "1", "2", "1", "2", "node-2"),
    ]


def test_a_place_replaces_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"}
    enter({**places([RankInfo(1, 2)])[0], **address}, interface="eth7")
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_GLOO_IFACE"]) == ("1", "eth7")
    enter({})
    assert not {"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} & set(os.environ)
    assert os.environ["HOROVOD_CONTROLLER"] == "gloo"


def test_the_interface_is_the_one_that_leads_to_the_driver() -> None:
    pytest.importorskip("psutil")
    assert interface_towards("127.0.0.1", 9) == ("lo" if sys.platform == "linux" else "lo0")


@pytest.fixture
def internal_error(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Horovod's type of error, also where Horovod is not installed."""
    kind = type("HorovodInternalError", (RuntimeError,), {})
    monkeypatch.setitem(sys.modules, "horovod.common.exceptions", types.SimpleNamespace(HorovodInternalError=kind))
    return kind


def test_whose_error_it_is(internal_error: type[Exception]) -> None:
    lost = internal_error("Horovod has been shut down. This was caused by an exception on one of the ranks")
    mine = ValueError("bad batch")
    mine.__context__ = lost
    table: list[tuple[BaseException, bool]] = [
        (lost, True),
        (mine, True),
        (ValueError("Horovod initialization failed. Please check log messages above"), True),
        (internal_error("Mismatched allreduce tensor shapes: One rank sent a tensor of shape [2]"), False),
        (ValueError("bad batch"), False),
        (RuntimeError("Horovod has been shut down"), False),
    ]
    assert [leaving.is_interruption(error) for error, _ in table] == [expected for _, expected in table]


def test_without_horovod_no_error_is_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.common.exceptions", raising=False)
    assert not leaving.is_interruption(ValueError("Horovod initialization failed"))


def test_leaving_cuts_the_connections_of_whoever_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    done: list[bool] = []
    horovod = types.SimpleNamespace(shutdown=lambda: done.append(freed.wait(20)))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setattr(leaving, "GRACE_S", 0.05)
    leaving.shut_down(freed.set, limit_s=20)
    assert done == [True]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compression": "fp8"}, "'none', 'fp16'"),
        ({"op": "adasum"}, "'average', 'sum'"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": "two"}, "groups"),
        ({"gradient_predivide_factor": 0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "does not go with op='sum'"),
        ({"sparse_as_dense": 1}, "True or False"),
        ({"process_set": 3}, r"no \['process_set'\]; it takes \['backward_passes_per_step'"),
        ("fp16", "must be a dict"),
    ],
)
def test_arguments_are_checked(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HorovodArguments.taken_from(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": TrainingOptions(parallel="fsdp")}, "whole models"),
        ({"options": TrainingOptions(ddp_args={"bucket_cap_mb": 1})}, "horovod_args"),
        ({"options": TrainingOptions(comm_hook="fp16")}, "'compression': 'fp16'"),
        ({"options": TrainingOptions(sync_batchnorm=True)}, "SyncBatchNorm"),
        ({"options": TrainingOptions(parallel=None), "horovod_args": {"op": "sum"}}, "parallel=None"),
        ({"horovod_args": {"op": "max"}}, "'average', 'sum'"),
        ({"backend": "gloo", "horovod_args": {}}, "for backend='horovod'"),
    ],
)
def test_what_cannot_be_combined(given: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"backend": "horovod", "num_workers": 2, "use_gpu": False, **given}
    with pytest.raises(ConfigError, match=words):
        TorchTrainer(training_operator_cls=LedgerOperator, **arguments)


def test_missing_horovod_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name))
    recipe = r"make horovod.*tools/build_horovod\.py"
    with pytest.raises(ImportError, match=recipe):
        TorchTrainer(training_operator_cls=LedgerOperator, num_workers=2, use_gpu=False, backend="horovod")
    with pytest.raises(ImportError, match=recipe):
        parse_backend(HorovodConfig())


def test_horovod_for_another_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "horovod.torch", None)  # makes its import fail
    with pytest.raises(ImportError, match="does not work with the torch that is"):
        check_installed("torch")


def test_a_meeting_place_is_closed_and_can_be_called_off() -> None:
    place = MeetingPlace("127.0.0.1", wait_s=5)
    first, _ = place.open(assign_ranks(["a", "b"]))
    assert asked(first, "GET", "global/0")[0] == 404, "nobody is there yet"
    say_over(first)
    assert asked(first, "GET", "global/0")[0] == 410
    (again, _) = place.open(assign_ranks(["a", "b"]))
    assert again["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"
    with pytest.raises(ConnectionRefusedError):
        asked(first, "GET", "global/0")
    say_over(first)  # too late: there is nobody to hear it
    assert place.open([]) == []


def test_workers_of_a_node_see_each_others_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HorovodMeeting(host="127.0.0.1", wait_s=1, use_gpu=True)
    plans = driver.plan(assign_ranks(["a", "a", "b"]), [{"gpus": "3"}, {"gpus": "7"}, {"gpus": "3"}])
    assert [plan["gpus"] for plan in plans] == ["3,7", "3,7", "3"]
    assert driver.plan([]) == []
    plain = HorovodMeeting(host="127.0.0.1", wait_s=1)
    assert not plain.needs_offers and plain.plan(assign_ranks(["a"]))[0]["gpus"] is None
    plain.plan([])


def test_when_all_ranks_have_finished_the_next_init_finds_an_empty_board() -> None:
    place = MeetingPlace("127.0.0.1", wait_s=5)
    environment = place.open(assign_ranks(["a", "b"]))[0]
    for rank in ("0", "1"):
        assert asked(environment, "PUT", f"global/{rank}", b"address")[0] == 200
    for again in ("0", "0"):  # one rank asks twice: its first answer was lost
        assert asked(environment, "DELETE", f"global/{again}")[0] == 200
    assert asked(environment, "GET", "global/1") == (200, b"address")
    asked(environment, "DELETE", "global/1")
    assert asked(environment, "GET", "global/1")[0] == 404
    place.close()


# -- strangers ----------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Iterator[dict[str, str]]:
    """The environment of rank 0; rank 1 has left its address."""
    place = MeetingPlace("127.0.0.1", wait_s=5)
    environment = place.open(assign_ranks(["a", "b"]))[0]
    asked(environment, "PUT", "global/1", b"address")
    yield environment
    place.close()


@pytest.mark.parametrize("secret", ["", "/" + "0" * 32, "/" + "0" * 32 + ":80", "//"])
def test_a_stranger_can_neither_read_nor_change_what_is_on_the_board(board: dict[str, str], secret: str) -> None:
    where = board["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
    theirs = {**board, "HOROVOD_GLOO_RENDEZVOUS_ADDR": where + secret}
    for method, path in (
        ("GET", "global/1"),
        ("PUT", "global/1"),
        ("PUT", "raysgd-over/1"),
        ("DELETE", "global/0"),
        ("DELETE", "global/1"),
    ):
        status, content = asked(theirs, method, path, b"evil" if method == "PUT" else b"")
        assert status >= 400 and content == b""
    assert asked(board, "GET", "global/1") == (200, b"address")


def test_what_a_stranger_sends_is_not_kept(board: dict[str, str]) -> None:
    """Neither is a body read that is announced, nor a head that never ends. Two rounds: what a process takes once for
    its work is no leak."""
    address = ("127.0.0.1", int(board["HOROVOD_GLOO_RENDEZVOUS_PORT"]))

    def send(head: bytes, count: int) -> None:
        with socket.create_connection(address, timeout=10) as stranger, contextlib.suppress(OSError):
            stranger.sendall(head)
            for _ in range(count):
                stranger.sendall(b"x" * (1 << 20))

    before = psutil.Process().memory_info().rss
    for _ in range(3):
        send(b"PUT /global/1 HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n", 100)
        send(b"GET /", 100)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert asked(board, "GET", "global/1") == (200, b"address")


def test_a_rank_cannot_fill_the_drivers_memory_either(board: dict[str, str]) -> None:
    with contextlib.suppress(ConnectionError):  # the server may hang up before it has read all
        assert asked(board, "PUT", "global/2", b"x" * (1 << 20))[0] == 413
    assert asked(board, "GET", "global/2")[0] == 404


def test_three_hundred_silent_and_slow_clients_do_not_keep_ranks_from_the_board(board: dict[str, str]) -> None:
    address = ("127.0.0.1", int(board["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    threads = threading.active_count()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(300)]
        for client in clients[::3]:
            with contextlib.suppress(OSError):
                client.sendall(b"GET /gl")
        for _ in range(3):
            assert asked(board, "GET", "global/1") == (200, b"address")
        assert threading.active_count() <= threads + 1
        last = clients[-1]
        last.settimeout(60)
        assert last.recv(1) == b"", "who says nothing is shown out"


@pytest.mark.parametrize(
    "what",
    [
        b"\x00" * 64,
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
def test_what_is_no_request_of_horovods_changes_nothing(board: dict[str, str], what: bytes) -> None:
    secret = board["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2].encode()
    address = ("127.0.0.1", int(board["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    with socket.create_connection(address, timeout=30) as stranger:
        stranger.sendall(what.replace(b"%SECRET", secret))
        stranger.shutdown(socket.SHUT_WR)
        assert not stranger.recv(4096).startswith(b"HTTP/1.0 200")
    assert asked(board, "GET", "global/1") == (200, b"address")


def asked(environment: dict[str, str], method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """What Horovod's own client gets: it puts the address before the port and its path."""
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

"""Where ranks sit in Horovod's words, which errors are whose, and how the library says that Horovod is missing."""

import http.client
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from raysgd import ConfigError, TorchTrainer
from raysgd.horovod import parting
from raysgd.horovod.arguments import HorovodArguments, check_installed
from raysgd.horovod.rendezvous import Board, MeetingPlace, enter, interface_towards, places, say_over
from raysgd.rendezvous import Seat, assign_seats
from raysgd.torch.devices import share_devices
from raysgd.train.backends import HorovodConfig, parse_backend
from tests.faults import LedgerOperator


def test_places_on_uneven_nodes() -> None:
    """A cross rank counts the nodes that have a worker of this local rank."""
    words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    given = places(assign_seats(["a", "b", "a", "c", "c"]))
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
    enter({**places([Seat(1, 2)])[0], **address}, interface="eth7")
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
    assert [parting.is_interruption(error) for error, _ in table] == [expected for _, expected in table]


def test_without_horovod_no_error_is_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.common.exceptions", raising=False)
    assert not parting.is_interruption(ValueError("Horovod initialization failed"))


def test_leaving_cuts_the_connections_of_whoever_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    freed = threading.Event()
    done: list[bool] = []
    horovod = types.SimpleNamespace(shutdown=lambda: done.append(freed.wait(20)))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setattr(parting, "GRACE_S", 0.05)
    parting.shut_down(freed.set, limit_s=20)
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
        ({"parallel": "fsdp"}, "whole models"),
        ({"ddp_args": {"bucket_cap_mb": 1}}, "horovod_args"),
        ({"comm_hook": "fp16"}, "'compression': 'fp16'"),
        ({"sync_batchnorm": True}, "SyncBatchNorm"),
        ({"parallel": None, "horovod_args": {"op": "sum"}}, "parallel=None"),
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
    recipe = r"make horovod.*python -m raysgd\.horovod\.build"
    with pytest.raises(ImportError, match=recipe):
        TorchTrainer(training_operator_cls=LedgerOperator, num_workers=2, use_gpu=False, backend="horovod")
    with pytest.raises(ImportError, match=recipe):
        parse_backend(HorovodConfig())


def test_horovod_for_another_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "horovod.torch", None)  # makes its import fail
    with pytest.raises(ImportError, match="does not work with the torch that is"):
        check_installed("torch")


@pytest.mark.horovod
def test_a_meeting_place_is_closed_and_can_be_called_off(tmp_path: Path) -> None:
    place = MeetingPlace("127.0.0.1", wait_s=5)
    first, _ = place.open(assign_seats(["a", "b"]))
    port = int(first["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    assert asked(port) == 404, "nobody is there yet"
    say_over(first)
    assert asked(port) == 410
    (again, _) = place.open(assign_seats(["a", "b"]))
    assert again["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"
    with pytest.raises(ConnectionRefusedError):
        asked(port)
    say_over(first)  # too late: there is nobody to hear it
    assert place.open([]) == []


@pytest.mark.horovod
def test_workers_of_a_node_learn_of_each_others_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = assign_seats(["a", "a", "b"])
    place = MeetingPlace("127.0.0.1", wait_s=1)
    boards = [Board(environment) for environment in place.open(seats)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConnectionError, match="0/1"):
        share_devices(boards[0], seats[0])
    boards[1].set("0/1", "7")
    assert share_devices(boards[0], seats[0]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,7"
    place.close()


def asked(port: int) -> int:
    """For the first rank's address, as Horovod asks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/global/0")
        return connection.getresponse().status
    finally:
        connection.close()

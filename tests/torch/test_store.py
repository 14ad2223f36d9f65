"""Who can reach the store of a generation, and what a rank does that comes late or to a busy machine."""

import datetime
import multiprocessing
import os
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from raysgd.rendezvous import assign_seats
from raysgd.torch.backend import TorchBackend

HOST = "127.0.0.2"  # also of this machine, as all of 127.0.0.0/8 on Linux, and not the one that others listen on
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address, which Linux has")


def listening(port: int) -> list[str]:
    """The addresses on which this process listens at that port."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


@ON_LINUX
def test_the_store_listens_on_the_address_that_the_workers_are_given() -> None:
    driver = TorchBackend("gloo", host=HOST, join_s=10)
    settings = driver.plan(assign_seats(["a", "a"]))
    try:
        assert settings[0]["host"] == HOST
        assert listening(settings[0]["port"]) == [HOST]
    finally:
        driver.plan([])


def meet(backend: TorchBackend, seat: Any, settings: dict[str, Any], said: Any) -> None:
    """Join, look at the group with a new subgroup, and leave."""
    try:
        backend.join(seat, settings)
        count = torch.ones(1)
        dist.all_reduce(count, group=dist.new_group([0, 1]))
        said.put(int(count.item()))
        backend.leave()
    except Exception as error:
        said.put(repr(error))


def met(driver: TorchBackend, plans: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=meet, args=(driver, *plan, said), daemon=True) for plan in plans]
    for rank in ranks:
        rank.start()
    answers = [said.get(timeout=100) for _ in ranks]
    for rank in ranks:
        rank.join(20)
        rank.kill()
    return answers


def plausible_keys(generation: int, size: int) -> list[str]:
    """What a client that has read the source, but has no secret, would write."""
    words = [f"generation-{generation}", f"generation-{generation}/default_pg", "default_pg", ""]
    names = [f"{kind}{rank}" for kind in ("here-", "", "rank_", "0/rank_", "worker_count") for rank in range(size)]
    return [f"{word}/{name}".lstrip("/") for word in words for name in names]


def test_a_client_that_knows_the_names_of_the_keys_cannot_disturb_a_rendezvous() -> None:
    driver, seats = TorchBackend("gloo", join_s=60, collective_s=30), assign_seats(["a", "a"], generation=1)
    settings = driver.plan(seats)
    stranger = dist.TCPStore(settings[0]["host"], settings[0]["port"], None, False)  # type: ignore[attr-defined]
    for key in plausible_keys(1, 2):
        stranger.set(key, b"\xff" * 136)
    try:
        assert met(driver, list(zip(seats, settings, strict=True))) == [2, 2]
    finally:
        driver.plan([])


def test_every_generation_has_a_secret_of_its_own_that_no_error_shows() -> None:
    driver, seats = TorchBackend("gloo", join_s=1), assign_seats(["a", "a"], generation=1)
    first, second = driver.plan(seats)[0], driver.plan(seats)[0]
    secrets = {value for value in first.values() if isinstance(value, str) and len(value) >= 32}
    assert secrets and not secrets & set(second.values())
    with pytest.raises(RuntimeError) as raised:
        driver.join(seats[0], second)  # the other rank never comes
    driver.plan([])
    assert not any(str(value) in str(raised.value) for value in second.values() if len(str(value)) >= 32)


def attacks() -> dict[str, bytes]:
    validated = b"\x00" + struct.pack("<I", 0x3C85F7CE)
    return {
        "nothing": b"",
        "random bytes": os.urandom(4096),
        "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "64 x 0xff": b"\xff" * 64,
        "half a message": validated[:3],
        "validated, then random bytes": validated + os.urandom(4096),
        "a huge length": validated + b"\x01" + struct.pack("<Q", (1 << 64) - 1),
        "many keys": validated + b"\x06" + struct.pack("<Q", 1 << 60),
    }


@pytest.mark.parametrize("what", attacks())
def test_a_rendezvous_with_strangers_at_the_store(what: str) -> None:
    """Ten of them, and they stay."""
    driver, seats = TorchBackend("gloo", join_s=60, collective_s=30), assign_seats(["a"], generation=1)
    settings = driver.plan(seats)[0]
    with ExitStack() as stack:
        for _ in range(10):
            stranger = stack.enter_context(socket.create_connection((settings["host"], settings["port"]), timeout=5))
            stranger.sendall(attacks()[what])
        try:
            driver.join(seats[0], settings)
            assert dist.get_world_size() == 1
        finally:
            driver.leave()
            driver.plan([])


def test_a_rank_that_a_rendezvous_ends_under_is_free_at_once() -> None:
    """It is connected already, and waits for the store's first answer, when the driver closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def call_off() -> None:
        for _ in range(2):
            taken.append(listener.accept()[0])
        time.sleep(0.3)
        listener.close()
        for connection in taken:
            connection.close()

    threading.Thread(target=call_off, daemon=True).start()
    late = TorchBackend("gloo", join_s=60)
    settings = {"host": "127.0.0.1", "port": listener.getsockname()[1], "secret": "0" * 32}
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="is over") as raised:
        late.join(assign_seats(["a", "a"])[1], settings)
    assert late.is_interruption(raised.value)
    assert time.monotonic() - began < 10


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_a_store_that_answers_late_is_asked_once() -> None:
    """As on a machine whose cores are all busy: whoever gave up and asked again would make it busier."""
    asked: list[float] = []
    listener = socket.create_server(("127.0.0.1", 0))
    driver = TorchBackend("gloo", join_s=60)
    store = driver.plan(assign_seats(["a", "a"]))[0]

    def relay(near: socket.socket, far: socket.socket) -> None:
        while content := near.recv(4096):
            far.sendall(content)
        far.close()

    def slow() -> None:
        while True:
            near, _ = listener.accept()
            asked.append(time.monotonic())

            def forward(near: socket.socket = near) -> None:
                if near.recv(1, socket.MSG_PEEK):
                    time.sleep(2.0)
                    far = socket.create_connection((store["host"], store["port"]))
                    threading.Thread(target=relay, args=(far, near), daemon=True).start()
                    relay(near, far)

            threading.Thread(target=forward, daemon=True).start()

    threading.Thread(target=slow, daemon=True).start()
    late, seats = TorchBackend("gloo", join_s=60, collective_s=30), assign_seats(["a"])
    try:
        late.join(seats[0], {**store, "port": listener.getsockname()[1]})
        assert dist.get_world_size() == 1
    finally:
        late.leave()
        driver.plan([])
    assert len(asked) <= 2, "one connection that watches, and one client"


@pytest.mark.parametrize("refuses", ["bound sockets", "libuv"])
def test_a_torch_that_cannot_take_a_bound_socket_still_has_a_store(
    monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    plain = dist.TCPStore  # type: ignore[attr-defined]

    def older(*args: Any, use_libuv: bool = True, master_listen_fd: int | None = None, **others: Any) -> Any:
        if refuses == "libuv" and use_libuv:
            raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")  # type: ignore[attr-defined]
        if refuses == "bound sockets" and use_libuv and master_listen_fd is not None:
            raise NotImplementedError("The libuv TCPStore backend does not support initialization with an listen fd")
        return plain(*args, use_libuv=use_libuv, master_listen_fd=master_listen_fd, **others)

    monkeypatch.setattr(dist, "TCPStore", older)
    driver = TorchBackend("gloo", join_s=10)
    settings = driver.plan(assign_seats(["a", "a"]))[0]
    monkeypatch.undo()
    timeout = datetime.timedelta(seconds=5)
    client = dist.TCPStore(settings["host"], settings["port"], None, False, timeout=timeout)  # type: ignore[attr-defined]
    client.set("a", "b")
    assert client.get("a") == b"b"
    driver.plan([])


def test_a_driver_behind_nat_still_has_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that others know it by is not one of its own, so no socket can be bound to it."""
    plain = socket.create_server

    def refused(address: Any, **others: Any) -> socket.socket:
        if address[0] == "127.0.0.1":
            raise OSError(99, "Cannot assign requested address")
        return plain(address, **others)

    monkeypatch.setattr(socket, "create_server", refused)
    driver, seats = TorchBackend("gloo", join_s=30, collective_s=10), assign_seats(["a"])
    settings = driver.plan(seats)[0]
    try:
        driver.join(seats[0], settings)
    finally:
        driver.leave()
        driver.plan([])

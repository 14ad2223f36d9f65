"""Who can reach the store of a generation, and what ranks do that are late or run on a busy machine."""

import contextlib
import datetime
import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.torch.group import store
from raysgd.torch.group.process_group import TorchBackend
from raysgd.torch.group.store import exchange_addresses, open_store, wait_for_all
from tests.forked_workers import fresh_processes

HOST = "127.0.0.2"  # another loopback address: on Linux, all of 127.0.0.0/8 are
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address, which Linux has")


def listening(port: int) -> list[str]:
    """Return the addresses on which this process listens at that port."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


@ON_LINUX
def test_the_store_listens_on_the_address_that_workers_receive() -> None:
    driver = TorchBackend("gloo", host=HOST, join_s=10)
    settings = driver.plan(assign_ranks(["a", "a"]))
    try:
        assert settings[0]["host"] == HOST
        assert listening(settings[0]["port"]) == [HOST]
    finally:
        driver.plan([])


@pytest.mark.parametrize("made", [False, True])
def test_ctrl_c_while_a_store_opens(monkeypatch: pytest.MonkeyPatch, *, made: bool) -> None:
    """Whether or not the store has already taken the socket, that is closed, once. The guard of all tests would see it."""

    def interrupted(*given: Any, **named: Any) -> None:
        if made:
            store(*given, **named)
        raise KeyboardInterrupt

    store = dist.TCPStore
    monkeypatch.setattr(dist, "TCPStore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_store("127.0.0.1", limit_s=10)


def join_and_leave(backend: TorchBackend, rank_info: Any, settings: dict[str, Any]) -> int:
    backend.join(rank_info, settings)
    try:
        count = torch.ones(1)
        dist.all_reduce(count, group=dist.new_group([0, 1]))
        return int(count.item())
    finally:
        backend.leave()


def test_a_client_that_knows_the_names_of_the_keys_cannot_disturb_a_rendezvous() -> None:
    """The client writes these keys all the time. Ranks that read its values would use them as their peers' addresses."""
    driver, rank_infos = TorchBackend("gloo", join_s=200, collective_s=60), assign_ranks(["a", "a"], generation=1)
    settings = driver.plan(rank_infos)
    stranger, over = dist.TCPStore(settings[0]["host"], settings[0]["port"], None, False), threading.Event()

    def disturb() -> None:
        with contextlib.suppress(
            dist.DistError
        ):  # it is in the process of a rank, which ends all connections to the store
            while not over.wait(0.0005):
                for rank in range(2):
                    stranger.set(f"generation-1/0//cpu//0/{rank}", "x" * 136)

    thread = threading.Thread(target=disturb)
    thread.start()
    arguments = (driver, rank_infos[1], settings[1])
    peer = fresh_processes().Process(target=join_and_leave, args=arguments, daemon=True)
    peer.start()
    try:
        assert join_and_leave(driver, rank_infos[0], settings[0]) == 2
        peer.join(200)
        assert peer.exitcode == 0
    finally:
        peer.kill()
        over.set()
        thread.join()
        driver.plan([])


class Counted:
    """A store that counts the keys of each request."""

    def __init__(self, store: Any) -> None:
        self._store, self.keys = store, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def request(key: Any, *others: Any) -> Any:
            self.keys += len(key) if isinstance(key, list) else 1
            return method(key, *others)

        return request


def test_a_rank_asks_for_the_same_few_keys_in_a_group_of_any_size() -> None:
    costs = {}
    for ranks in (1, 2, 24):
        store = dist.HashStore()
        clients = [Counted(store) for _ in range(ranks)]
        found: list[Any] = [None] * ranks

        def meet(rank_info: Any, clients: list[Counted] = clients, found: list[Any] = found) -> None:
            rank = rank_info.world_rank
            wait_for_all(clients[rank], rank_info, limit_s=30)
            own = [("127.0.0.1", 1000 + rank), ("::1", 2000 + rank)][: 1 + rank % 2]
            found[rank] = exchange_addresses(clients[rank], rank_info, own, limit_s=30)

        threads = [threading.Thread(target=meet, args=(rank_info,)) for rank_info in assign_ranks(["a"] * ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        expected = [("127.0.0.1", 1000 + rank) for rank in range(ranks)]
        expected += [("::1", 2000 + rank) for rank in range(1, ranks, 2)]
        assert [sorted(each) for each in found] == [sorted(expected)] * ranks
        costs[ranks] = max(client.keys for client in clients)
    assert max(costs.values()) <= 8, costs


def test_every_generation_has_a_secret_which_no_error_contains() -> None:
    driver, rank_infos = TorchBackend("gloo", join_s=1), assign_ranks(["a", "a"], generation=1)
    first, second = driver.plan(rank_infos)[0], driver.plan(rank_infos)[0]
    secrets = {value for value in first.values() if isinstance(value, str) and len(value) >= 32}
    assert secrets and not secrets & set(second.values())
    with pytest.raises(RuntimeError) as raised:
        driver.join(rank_infos[0], second)  # the other rank never comes
    driver.plan([])
    assert not any(str(value) in str(raised.value) for value in second.values() if len(str(value)) >= 32)


@contextlib.contextmanager
def solo_rendezvous() -> Iterator[tuple[TorchBackend, RankInfo, dict[str, Any]]]:
    """Yield a backend that is both driver and rank, with what its only rank joins. It leaves at the end."""
    driver, (rank_info,) = TorchBackend("gloo", join_s=60, collective_s=30), assign_ranks(["a"], generation=1)
    try:
        yield driver, rank_info, driver.plan([rank_info])[0]
    finally:
        driver.leave()
        driver.plan([])


def attacks() -> list[bytes]:
    validated = b"\x00" + struct.pack("<I", 0x3C85F7CE)
    random, http, half = os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", validated[:3]
    huge_length = validated + b"\x01" + struct.pack("<Q", (1 << 64) - 1)
    many_keys = validated + b"\x06" + struct.pack("<Q", 1 << 60)
    return [b"", random, http, b"\xff" * 64, half, validated + random, huge_length, many_keys]


def test_a_rendezvous_with_strangers_at_the_store() -> None:
    """Clients that do not belong to the group stay connected."""
    with ExitStack() as stack, solo_rendezvous() as (driver, rank_info, settings):
        for content in [*attacks(), *attacks()]:
            stranger = stack.enter_context(socket.create_connection((settings["host"], settings["port"]), timeout=5))
            stranger.sendall(content)
        driver.join(rank_info, settings)
        assert dist.get_world_size() == 1


def test_a_rank_stops_waiting_when_its_rendezvous_ends() -> None:
    """The rank is connected, and waits for the store's first answer, when the driver closes the store."""
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
    with pytest.raises(RuntimeError, match="has ended") as raised:
        late.join(assign_ranks(["a", "a"])[1], settings)
    assert late.is_interruption(raised.value)
    assert time.monotonic() - began < 10
    wait_for_clients()


def wait_for_clients() -> None:
    """Wait for the threads in which torch's client still tries to connect. It stops after 5 s."""
    for thread in threading.enumerate():
        if thread.name == "raysgd-store":
            thread.join(timeout=30)


def pump(near: socket.socket, far: socket.socket) -> None:
    with near, far, contextlib.suppress(OSError):
        while content := near.recv(4096):
            far.sendall(content)


class Relay:
    """A proxy of a store. It forwards the first client's messages after `late_s`, and those of others at once."""

    def __init__(self, settings: dict[str, Any], late_s: float) -> None:
        self.clients = 0
        self._store, self._late_s = (settings["host"], settings["port"]), late_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.settings = {**settings, "port": self._listener.getsockname()[1]}
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # `accept` returns in its thread
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._forward, args=(self._listener.accept()[0],), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        if near.recv(1, socket.MSG_PEEK):
            self.clients += 1
            time.sleep(self._late_s if self.clients == 1 else 0)
            try:
                far = socket.create_connection(self._store)
            except OSError:  # the rendezvous has ended
                return near.close()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()
            pump(near, far)


@pytest.mark.parametrize(("late_s", "more"), [(0.8, False), (50, True)])
def test_a_second_client_replaces_one_that_hangs(late_s: float, more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer delays torch's client. On a busy machine the client is only slow, and a second
    client would make the machine busier."""
    if not more:  # this machine may be busy, too
        monkeypatch.setattr(store, "MORE_CLIENTS_S", [20 * each for each in store.MORE_CLIENTS_S])
    with solo_rendezvous() as (driver, rank_info, settings):
        relay, began = Relay(settings, late_s), time.monotonic()
        driver.join(rank_info, relay.settings)
        assert dist.get_world_size() == 1
        assert time.monotonic() - began < 40
    relay.close()
    wait_for_clients()
    assert (relay.clients > 1) is more


def test_a_store_of_a_torch_without_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dist.TCPStore

    def without_libuv(*args: Any, **others: Any) -> Any:
        if others.get("use_libuv", True):
            raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
        return plain(*args, **others)

    monkeypatch.setattr(dist, "TCPStore", without_libuv)
    driver = TorchBackend("gloo", join_s=10)
    settings = driver.plan(assign_ranks(["a", "a"]))[0]
    monkeypatch.undo()
    timeout = datetime.timedelta(seconds=5)
    client = dist.TCPStore(settings["host"], settings["port"], None, False, timeout=timeout)
    client.set("a", "b")
    assert client.get("a") == b"b"
    gc.disable()  # the store must close with its generation, not when the garbage collector happens to run
    try:
        driver.plan([])
        with pytest.raises(OSError):
            socket.create_connection((settings["host"], settings["port"]), timeout=5).close()
    finally:
        gc.enable()


def test_a_store_of_a_driver_behind_nat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address at which others reach the driver is not one of its own, so no socket can be bound to it."""
    plain = socket.create_server

    def refused(address: Any, **others: Any) -> socket.socket:
        if address[0] == "127.0.0.1":
            raise OSError(99, "Cannot assign requested address")
        return plain(address, **others)

    monkeypatch.setattr(socket, "create_server", refused)
    with solo_rendezvous() as (driver, rank_info, settings):
        driver.join(rank_info, settings)

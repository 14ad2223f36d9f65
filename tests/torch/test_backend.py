"""How ranks form and leave a process group, also if a peer is late or fails, and which errors count as interruptions."""

import pickle
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import raysgd.torch.group.process_group
from raysgd.core.control import Control
from raysgd.core.outcomes import Ok
from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.torch.group.process_group import TorchBackend
from raysgd.torch.group.sockets import _listening
from raysgd.workers.replica_host import ReplicaHost
from tests.forked_workers import fresh_processes

GENERATIONS = 12


def wait() -> None:
    """Raise an error whose traceback refers to the model, and so to its group: both are freed with the error."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, model)


def part(backend: TorchBackend) -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    time.sleep(0.02)
    backend.leave()


def one_rank(backend: TorchBackend, plans: list[tuple[RankInfo, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(60.0)  # a thread that wants the interpreter waits until the other has to wait itself
    for rank_info, settings in plans:
        backend.join(rank_info, settings)
        try:
            part(backend) if rank_info.world_rank else wait()
        except RuntimeError as error:
            assert backend.is_interruption(error), error
            backend.leave()


@pytest.mark.more
def test_leaving_a_group_cannot_deadlock_with_its_threads() -> None:
    """If the backend kept no reference to the group, rank 0 would hang after a few generations."""
    drivers = [TorchBackend("gloo", join_s=30, collective_s=30) for _ in range(GENERATIONS)]
    plans: list[list[tuple[RankInfo, dict[str, Any]]]] = [[], []]
    for generation, driver in enumerate(drivers):
        rank_infos = assign_ranks(["a", "a"], generation=generation)
        for rank_info, settings in zip(rank_infos, driver.plan(rank_infos), strict=True):
            plans[rank_info.world_rank].append((rank_info, settings))
    context = fresh_processes()
    ranks = [context.Process(target=one_rank, args=(drivers[0], plan), daemon=True) for plan in plans]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    stuck = [index for index, rank in enumerate(ranks) if rank.exitcode is None]
    for rank in ranks:
        rank.kill()
    assert not stuck, "these ranks hang"
    assert [rank.exitcode for rank in ranks] == [0, 0]


def joined(driver: TorchBackend, rank_info: RankInfo, settings: dict[str, Any], form_s: float) -> tuple[int, float]:
    """Join, and leave. Return the number of ranks, and the limit of a collective."""
    raysgd.torch.group.process_group.FORM_S = form_s
    driver.join(rank_info, settings)
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    found = dist.get_world_size(), gloo.options._timeout.total_seconds()
    driver.leave()
    return found


def join_late(said: Any, *given: Any) -> None:
    time.sleep(6.5)
    said.put(joined(*given, form_s=5.0))


def test_the_limit_for_connections_applies_neither_to_late_ranks_nor_to_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raysgd.torch.group.process_group, "FORM_S", 5.0)  # restored afterwards
    driver, rank_infos = TorchBackend("gloo", join_s=200, collective_s=50), assign_ranks(["a", "a"], generation=1)
    here, there = zip(rank_infos, driver.plan(rank_infos), strict=True)
    context = fresh_processes()
    said = context.Queue()
    late = context.Process(target=join_late, args=(said, driver, *there), daemon=True)
    late.start()
    assert [joined(driver, *here, form_s=5.0), said.get(timeout=200)] == [(2, 50), (2, 50)]
    late.join(timeout=200)
    driver.plan([])


class Attacked(dist.Store):
    """A rank's store. Before the rank publishes where its gloo listens, a stranger connects there, and sends the number that
    gloo has given to the connection with a peer."""

    def __init__(self, store: Any, number: int) -> None:
        super().__init__()
        self._store, self._number, self._strangers = store, number, list[socket.socket]()
        self._before = set(_listening())

    def set(self, key: str, value: Any) -> None:
        for address in set(_listening()) - self._before:
            self._before.add(address)
            self._strangers.append(socket.create_connection(address))
            self._strangers[-1].sendall(self._number.to_bytes(8, "little"))
            time.sleep(0.1)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def append(self, key: str, value: Any) -> None:
        self._store.append(key, value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))


class AttackedBackend(TorchBackend):
    number = 0

    def _connect(self, settings: dict[str, Any]) -> Any:
        self.attacked = Attacked(super()._connect(settings), self.number)  # torch keeps only what is behind it
        return self.attacked


def join_attacked(said: Any, driver: TorchBackend, rank_info: RankInfo, settings: dict[str, Any]) -> None:
    backend = driver
    if rank_info.world_rank in (0, 2):  # whichever of them waits for the other's connection, which their ports decide
        backend = attacked = AttackedBackend("gloo", join_s=200)
        attacked.number = 2 - rank_info.world_rank  # gloo numbers the peers by rank
    try:
        joined(backend, rank_info, settings, form_s=1.0)
        said.put((rank_info.world_rank, False))
    except RuntimeError as error:
        assert backend.is_interruption(error), error
        said.put((rank_info.world_rank, True))
        backend.leave()


def test_a_stranger_in_the_place_of_a_peer_is_a_failure_to_join() -> None:
    """Rank 2 does not exchange anything with rank 0 in an `all_reduce` of four ranks. So the next call that uses this
    connection would wait for `collective_s`."""
    driver, rank_infos = TorchBackend("gloo", join_s=200, collective_s=600), assign_ranks(["a"] * 4, generation=1)
    plans, context = driver.plan(rank_infos), fresh_processes()
    said = context.Queue()
    ranks = [
        context.Process(target=join_attacked, args=(said, driver, *each), daemon=True)
        for each in zip(rank_infos, plans, strict=True)
    ]
    for rank in ranks:
        rank.start()
    found = dict(said.get(timeout=200) for _ in ranks)
    for rank in ranks:
        rank.join(timeout=200)
    driver.plan([])
    assert found[0] and found[2], "the driver tells the others"


def test_a_rank_whose_generation_failed_to_form_joins_the_next_one() -> None:
    """A peer failed right after the rendezvous: the other ranks join the next one, without a call of `leave` in between."""
    host = ReplicaHost(TorchBackend("gloo"), Control())
    try:
        for generation in (1, 2):
            outcome = host.perform("join", {"rank_info": RankInfo(solo=True, generation=generation), "settings": {}})
            assert isinstance(outcome, Ok), outcome
    finally:
        host.perform("leave", {})
    assert not dist.is_initialized()


def test_a_backend_in_use_can_be_pickled() -> None:
    backend = TorchBackend("gloo")
    backend.join(RankInfo(solo=True), {})
    try:
        assert pickle.loads(pickle.dumps(backend)).name == "gloo"
    finally:
        backend.leave()


def test_each_collective_that_waits_for_a_stopped_peer_is_interrupted() -> None:
    """When one exceeds its limit, the errors of the others do not name gloo."""
    store, groups = dist.HashStore(), ThreadPoolExecutor(2)  # type: ignore[attr-defined]
    limit, options = timedelta(seconds=60), dist.AllreduceOptions()  # the limit is for connecting
    options.timeout = timedelta(seconds=1)
    made = groups.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2))  # type: ignore[attr-defined]
    waiting, _stopped = made
    for work in [waiting.allreduce([torch.zeros(10_000)], options) for _ in range(3)]:
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        assert TorchBackend("gloo").is_interruption(caught.value), caught.value


def test_only_gloos_own_errors_are_interruptions() -> None:
    backend = TorchBackend("gloo")
    assert backend.is_interruption(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection reset"))
    assert not backend.is_interruption(RuntimeError("the glove does not fit"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for call in (dist.all_gather, dist.gather):
            with pytest.raises(RuntimeError, match="list") as wrong:
                call([torch.zeros(1)] * 2, torch.zeros(1)) if call is dist.all_gather else call(
                    torch.zeros(1), [torch.zeros(1)] * 2
                )
            assert not backend.is_interruption(wrong.value), "an error in the arguments is the user's"
    finally:
        dist.destroy_process_group()
    with pytest.raises(KeyError) as caught:
        try:
            raise RuntimeError("gloo: Timed out waiting 10 ms")
        except RuntimeError:
            {}["result"]
    assert backend.is_interruption(caught.value)

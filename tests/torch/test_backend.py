"""How ranks meet, also when a peer is late or lost; how they part under a wrapped model; and what counts as a break."""

import multiprocessing
import pickle
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import raysgd.torch.process_group
from raysgd.core.outcomes import Ok
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.torch.process_group import TorchBackend
from raysgd.workers.replica_host import ReplicaHost

GENERATIONS = 30


def wait() -> None:
    """The error's traceback holds the model, and the model its group: both go when the error does."""
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


def test_the_end_of_a_group_never_waits_for_threads_that_wait_for_the_interpreter() -> None:
    """Without a handle of the backend's own, rank 0 stands still for good after a few generations."""
    drivers = [TorchBackend("gloo", join_s=30, collective_s=30) for _ in range(GENERATIONS)]
    plans: list[list[tuple[RankInfo, dict[str, Any]]]] = [[], []]
    for generation, driver in enumerate(drivers):
        rank_infos = assign_ranks(["a", "a"], generation=generation)
        for rank_info, settings in zip(rank_infos, driver.plan(rank_infos), strict=True):
            plans[rank_info.world_rank].append((rank_info, settings))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=one_rank, args=(drivers[0], plan), daemon=True) for plan in plans]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    stuck = [index for index, rank in enumerate(ranks) if rank.exitcode is None]
    for rank in ranks:
        rank.kill()
    assert not stuck, "these ranks stand still"
    assert [rank.exitcode for rank in ranks] == [0, 0]


def meet_late(driver: TorchBackend, rank_info: RankInfo, settings: dict[str, Any], late_s: float, said: Any) -> None:
    raysgd.torch.process_group.FORM_S = 1.0
    time.sleep(late_s)
    driver.join(rank_info, settings)
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    said.put((dist.get_world_size(), gloo.options._timeout.total_seconds()))
    driver.leave()


def test_a_short_limit_for_the_connections_is_none_for_those_who_come_late_nor_for_collectives() -> None:
    driver, rank_infos = TorchBackend("gloo", join_s=60, collective_s=50), assign_ranks(["a", "a"], generation=1)
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [
        context.Process(target=meet_late, args=(driver, rank_info, settings, late_s, said), daemon=True)
        for late_s, rank_info, settings in zip((0, 3), rank_infos, driver.plan(rank_infos), strict=True)
    ]
    for rank in ranks:
        rank.start()
    assert [said.get(timeout=60) for _ in ranks] == [(2, 50), (2, 50)]
    for rank in ranks:
        rank.join(timeout=60)


def test_who_met_a_generation_that_did_not_come_to_stand_joins_the_next_one() -> None:
    """A peer died right after the meeting: the recruits are asked again, and were no members that would be asked to leave."""
    host = ReplicaHost(TorchBackend("gloo"), Control())
    try:
        for generation in (1, 2):
            outcome = host.perform("join", {"rank_info": RankInfo(solo=True, generation=generation), "settings": {}})
            assert isinstance(outcome, Ok), outcome
    finally:
        host.perform("leave", {})
    assert not dist.is_initialized()


def test_a_member_of_a_group_can_be_sent_to_others() -> None:
    backend = TorchBackend("gloo")
    backend.join(RankInfo(solo=True), {})
    try:
        assert pickle.loads(pickle.dumps(backend)).name == "gloo"
    finally:
        backend.leave()


def test_only_what_gloo_says_itself_is_an_interruption() -> None:
    backend = TorchBackend("gloo")
    assert backend.is_interruption(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection reset"))
    assert not backend.is_interruption(RuntimeError("the glove does not fit"))
    with pytest.raises(KeyError) as caught:
        try:
            raise RuntimeError("gloo: Timed out waiting 10 ms")
        except RuntimeError:
            {}["result"]
    assert backend.is_interruption(caught.value)

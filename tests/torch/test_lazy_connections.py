"""gloo opens a connection when two ranks first exchange something, and those that open late are freed and replaced, too."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.torch.process_group import TorchBackend
from raysgd.torch.sockets import _plain, _sockets

RANKS, STOPPED, LIMIT_S = 6, 5, 120


def connections(backend: TorchBackend) -> int:
    """Return how many connections of this process `abort` would shut down."""
    known = {*backend._gloo._own, *backend._gloo._remote}
    ends = [(_plain(each.getsockname()), _plain(each.getpeername())) for each in _sockets(listening=False)]
    return sum(here in known or there in backend._gloo._remote for here, there in ends)


def live(plans: list[tuple[TorchBackend, Any, Any]], rank: int, answers: Any, counted: Any, stopped: Any) -> None:
    """Run in a process of its own: be a rank of two generations. The last rank of the first one stops responding while the
    others wait for it: rank 2 on a connection that was opened late."""
    (backend, info, settings), *later = plans
    backend.join(info, settings)
    before, mine, other = connections(backend), torch.full((1,), float(rank)), torch.zeros(1)
    counted.wait(LIMIT_S)  # a peer that begins earlier would open its connection before this rank has counted
    first, second = (dist.send, dist.recv) if rank < RANKS // 2 else (dist.recv, dist.send)
    peer = (rank + RANKS // 2) % RANKS
    first(mine if first is dist.send else other, peer)
    second(other if second is dist.recv else mine, peer)
    answers.put((rank, float(other), connections(backend) - before))
    if rank == STOPPED:
        answers.close()
        answers.join_thread()  # otherwise its answer may not have been sent
        stopped.set()
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped.wait(LIMIT_S)
    threading.Timer(1.0, backend.abort).start()
    with pytest.raises(RuntimeError) as interrupted:
        dist.recv(other, STOPPED) if rank == 2 else dist.all_reduce(mine)
    assert backend.is_interruption(interrupted.value)
    backend.leave()
    for _, next_info, next_settings in later:
        backend.join(next_info, next_settings)
        total = torch.ones(1)
        dist.all_reduce(total)
        answers.put((rank, float(total), 0))
        backend.leave()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TorchBackend]]:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    made = [TorchBackend("gloo") for _ in range(2)]
    yield made
    for each in made:
        each.plan([])


def test_ranks_that_wait_on_a_late_connection_are_freed_and_go_on(backends: list[TorchBackend]) -> None:
    context: Any = multiprocessing.get_context("fork")
    answers, counted, stopped = context.Queue(), context.Barrier(RANKS), context.Event()
    generations: list[list[RankInfo]] = [assign_ranks(["n"] * size, generation=size) for size in (RANKS, STOPPED)]
    plans = [(each, infos, each.plan(infos)) for each, infos in zip(backends, generations, strict=True)]
    mine = [[(b, infos[r], given[r]) for b, infos, given in plans if r < len(infos)] for r in range(RANKS)]
    processes = [
        context.Process(target=live, args=(mine[rank], rank, answers, counted, stopped)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        exchanged = sorted(answers.get(timeout=LIMIT_S) for _ in range(RANKS))
        assert [value for _, value, _ in exchanged] == [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]
        assert all(opened == 1 for _, _, opened in exchanged), "each opened one connection late, which is known"
        recovered = sorted(answers.get(timeout=LIMIT_S) for _ in range(STOPPED))
        assert recovered == [(rank, float(STOPPED), 0) for rank in range(STOPPED)]
    finally:
        for process in processes:
            process.kill()
            process.join()

"""Ranks that are interrupted while they exchange data are freed, whatever gloo's own thread is doing at that moment."""

import multiprocessing
import os
import random
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.ranks import assign_ranks
from raysgd.torch.process_group import TorchBackend

RANKS, LIMIT_S = 3, 60
GENERATIONS = 3000 if os.environ.get("RAYSGD_SOAK") else 80


def live(backend: TorchBackend, orders: Any) -> None:
    """Run in a process of its own: in each generation, exchange data without a pause until the group is interrupted."""
    torch.set_num_threads(1)
    data = torch.ones(500)
    while True:
        info, settings = orders.recv()
        backend.join(info, settings)
        orders.send("joined")
        interrupter = threading.Thread(target=lambda: (orders.recv(), backend.abort()), daemon=True)
        interrupter.start()
        try:
            while True:
                dist.all_gather_object([None] * info.world_size, [info.world_rank] * random.randint(1, 50))
                dist.all_reduce(data)
                data.clamp_(max=1.0)
        except RuntimeError as error:
            assert backend.is_interruption(error), error
        interrupter.join()
        backend.leave()
        orders.send("left")


def test_ranks_are_freed_whatever_they_exchange() -> None:
    """gloo forgets data that it could not send at once when a peer asked for it, and then waits for its end."""
    context: Any = multiprocessing.get_context("fork")
    chance, planner, worker = random.Random(5), TorchBackend("gloo"), TorchBackend("gloo", collective_s=LIMIT_S)
    ends = [context.Pipe() for _ in range(RANKS)]
    processes = [context.Process(target=live, args=(worker, theirs), daemon=True) for _, theirs in ends]
    orders = [own for own, _ in ends]
    for process in processes:
        process.start()
    try:
        for generation in range(1, GENERATIONS + 1):
            infos = assign_ranks(["n"] * RANKS, generation=generation)
            for order, info, settings in zip(orders, infos, planner.plan(infos), strict=True):
                order.send((info, settings))
            assert [order.recv() for order in orders if order.poll(LIMIT_S)] == ["joined"] * RANKS
            time.sleep(chance.uniform(0, 0.005))
            for order in chance.sample(orders, RANKS):
                order.send("interrupt")
            left = [order.recv() for order in orders if order.poll(LIMIT_S / 6)]
            assert left == ["left"] * RANKS, f"a rank of generation {generation} still waits"
    finally:
        planner.plan([])
        for process in processes:
            process.kill()
            process.join()

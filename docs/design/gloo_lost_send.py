"""Interrupts gloo's collective calls at random moments, and counts those that then end only at their time limit. Only torch, on Linux.

In each round, the same processes form a new group and exchange data without a pause. Then each rank shuts down its connections of that
group, or one rank is killed first. gloo should end every rank's call with an error, within milliseconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import multiprocessing
import os
import random
import re
import socket
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

FORM_S = 30


def connections() -> dict[int, socket.socket]:
    """Return a copy of each of this process's TCP connections, by the kernel's number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                copy = socket.socket(fileno=os.dup(int(name)))
                copy.getpeername()
                if copy.family != socket.AF_UNIX:
                    found[os.fstat(copy.fileno()).st_ino] = copy
    return found


def exchange(op: str, rank: int, size: int, data: torch.Tensor) -> None:
    if op == "broadcast":
        dist.broadcast(data, 0)
    elif op == "mixed" and random.random() < 0.5:
        dist.all_gather_object([None] * size, [rank] * random.randint(1, 50))
    else:
        dist.all_reduce(data)
        data.clamp_(max=1.0)


def live(options: argparse.Namespace, rank: int, port: int, orders: Any) -> None:
    torch.set_num_threads(1)
    size, data = options.ranks, torch.ones(options.numel)
    held: dict[int, socket.socket] = {}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        group = dist.PrefixStore(str(orders.recv()), store)
        while held:
            held.popitem()[1].close()
        before = set(connections())
        limit = datetime.timedelta(seconds=FORM_S)
        dist.init_process_group(
            "gloo", store=group, rank=rank, world_size=size, timeout=limit
        )
        dist.all_reduce(torch.zeros(1))
        dist.distributed_c10d._set_pg_timeout(
            datetime.timedelta(seconds=options.limit)
        )
        held.update(
            (number, each)
            for number, each in connections().items()
            if number not in before
        )
        assert len(held) == size - 1, held
        orders.send("joined")

        def shut(how: int) -> None:
            for each in list(held.values()):
                with contextlib.suppress(OSError):
                    each.shutdown(how)

        interrupter = threading.Thread(target=lambda: shut(orders.recv()))
        interrupter.start()
        text = ""
        while not text:
            try:
                exchange(options.op, rank, size, data)
            except RuntimeError as error:
                text = str(error)
        if not options.hold:
            while held:
                held.popitem()[1].close()
        interrupter.join()
        dist.destroy_process_group()
        shut(socket.SHUT_WR)
        orders.send(text)


def brief(text: str) -> str:
    text = re.sub(r"\[?\S*/(\w+\.cc):(\d+)\]?", r"\1:\2", text.splitlines()[0])
    return re.sub(
        r"\[[\w.:]+\]:\d+|\d+\.\d+\.\d+\.\d+(:\d+)?", "PEER", text
    ).partition(". This is")[0]


def main(options: argparse.Namespace) -> None:
    context, chance = (
        multiprocessing.get_context("forkserver"),
        random.Random(options.seed),
    )
    context.set_forkserver_preload(["torch.distributed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> tuple[Any, Any]:
        own, theirs = context.Pipe()
        process = context.Process(
            target=live, args=(options, rank, store.port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return own, process

    workers = [start(rank) for rank in range(options.ranks)]
    how = {"rd": socket.SHUT_RD, "rdwr": socket.SHUT_RDWR}[options.shut]
    texts: collections.Counter[str] = collections.Counter()
    waited, began = 0, time.monotonic()
    for number in range(1, options.rounds + 1):
        for own, _ in workers:
            own.send(number)
        assert all(
            own.poll(2 * FORM_S) and own.recv() == "joined" for own, _ in workers
        )
        time.sleep(chance.uniform(0, options.delay))
        ranks = list(range(options.ranks))
        if options.kill:
            victim = ranks.pop(chance.randrange(options.ranks))
            workers[victim][1].kill()
        for rank in chance.sample(ranks, len(ranks)):
            workers[rank][0].send(how)
            time.sleep(chance.uniform(0, options.gap))
        deadline = time.monotonic() + options.limit / 2
        late = [
            rank
            for rank in ranks
            if not workers[rank][0].poll(max(0.0, deadline - time.monotonic()))
        ]
        waited += bool(late)
        for rank in ranks:
            assert workers[rank][0].poll(options.limit * 3), (
                f"rank {rank} waits longer than its time limit"
            )
            texts[
                ("late: " if rank in late else "") + brief(workers[rank][0].recv())
            ] += 1
        if options.kill:
            workers[victim][1].join()
            workers[victim] = start(victim)
        if number % 100 == 0 or number == options.rounds:
            print(
                f"{number} rounds, {waited} with a rank that waits, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    for text, count in texts.most_common():
        print(f"{count:7d} {text}")
    for _, process in workers:
        process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument(
        "--op", default="mixed", choices=["mixed", "all_reduce", "broadcast"]
    )
    parser.add_argument(
        "--numel", type=int, default=500, help="of float32, in one call"
    )
    parser.add_argument("--shut", default="rd", choices=["rd", "rdwr"])
    parser.add_argument(
        "--no-hold",
        dest="hold",
        action="store_false",
        help="let gloo's close() really close",
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        help="kill one rank before the others shut their connections down",
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.005,
        help="of the interruption, at most, in seconds",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=0.0,
        help="between the interruptions of two ranks, at most",
    )
    parser.add_argument(
        "--limit", type=float, default=2.0, help="of a collective call, in seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())

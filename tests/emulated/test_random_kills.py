"""Workers are killed at random places on the emulation of NCCL, where torch's watchdog notices it before the abort: the others continue
exactly. Their numbers determine the kills of a test: `-k "schedules and 20"` repeats those from 20 on."""

import os
import random
import time
from typing import Any

import pytest

from tests.emulated.runs import ROWS, Ground, Kill, trainer
from tests.faults import alive

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

WORKERS, QUICK, TOGETHER, SCHEDULES = 4, 3, 20, 100
RUN: dict[str, Any] = {
    "config": {"calls": "later"},
    "ddp_args": {"bucket_cap_mb": 1e-4},
    "elastic": {"snapshot_every": 2},
}
CALLS = 6


def drawn(number: int) -> list[Kill]:
    """Return the kills of different ranks, some of them shortly after another one."""
    draw = random.Random(f"ddp-{number}")
    kills: list[Kill] = []
    for rank in draw.sample(range(WORKERS), draw.choice([1, 1, 2, 2, 3])):
        if kills and draw.random() < 0.4:
            kills.append(Kill("", rank=rank, step=kills[-1].step, after_s=draw.choice([0.0, 0.01, 0.05])))
        else:
            place = draw.choice(["before", "in", "after"])
            kills.append(Kill("all_reduce", draw.randrange(CALLS), place, rank, draw.randrange(1, 5)))
    return kills


BLOCKS = [pytest.param(first, TOGETHER, marks=pytest.mark.nightly) for first in range(0, SCHEDULES, TOGETHER)]


@pytest.mark.parametrize(("first", "count"), [pytest.param(0, QUICK, id="quick"), *BLOCKS])
def test_schedules(first: int, count: int) -> None:
    network = {"network": True, "poll_s": 0.0001}
    with trainer(WORKERS, emulated=network, **RUN) as run:
        ground = Ground(run, WORKERS)
        for number in range(first, first + count):
            kills = drawn(number)
            print(number, kills, flush=True)
            ground.restore()
            pids = run.apply_all_workers(os.getpid)
            before = len(run.recoveries)
            ground.lay(*kills)
            assert run.train()["num_samples"] == ROWS
            time.sleep(0.06)  # until the last one has been killed
            difference = ground.difference()
            dead = {rank for rank, pid in enumerate(pids) if not alive(pid)}
            print(
                difference, sorted(dead), [(r.in_place, r.batches_redone) for r in run.recoveries[before:]], flush=True
            )
            assert difference < 1e-14
            assert dead and dead <= {each.rank for each in kills}, "other processes have ended, too"

"""A worker is killed at each collective call of a step, and at others. The weights and Adam's moments of all ranks equal those of an
undisturbed run, although an aborted call of NCCL's raises nothing, and leaves a part of its result."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated.runs import Changes, Counts, Ground, Kill, Mark, OwnStep, emulation, state_of, trainer
from tests.faults import alive

pytestmark = [pytest.mark.elastic, pytest.mark.usefixtures("ray_cluster")]

BUCKETS: dict[str, Any] = {"ddp_args": {"bucket_cap_mb": 1e-4}}  # a bucket for each layer, and one for a bias
DDP = {"config": {"calls": "later"}, **BUCKETS}
# No rank must make step 3, because of a sample that rank 1 has.
INFINITE = {"config": {"spoils": float("inf")}, **BUCKETS}
# The calls of a step: the first bucket, one in the backward pass, two more buckets, one after them, and a metric's after the step.
STEP, METRIC, PLACES = range(6), 5, ("before", "in", "after")
QUICK = [Kill(number=n) for n in (1, 2, 3, 4, METRIC)]


def more(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("given", "kills"),
    [
        (DDP, [*QUICK, (Kill(number=3), Kill("", rank=2, after_s=0.05))]),
        more(DDP, [Kill(number=n, place=p) for n in STEP for p in PLACES if Kill(number=n, place=p) not in QUICK]),
        more({"accumulate": 3, **BUCKETS}, [Kill(number=2, step=5), Kill(number=1, step=5), Kill("", step=4)]),
        # The second rank fails while the batches of three are trained in pieces.
        more({"workers": 4, **BUCKETS}, [(Kill(number=2, rank=3, step=2), Kill(number=1, step=4))]),
        more({"clip_norm": 0.1, **BUCKETS}, [Kill(number=1)]),
        more({"on_nonfinite": "skip", **INFINITE}, [Kill()]),
        ({"precision": "fp16", **INFINITE}, [Kill()]),
        # The first call is that of the counts.
        ({"operator": Counts, **BUCKETS}, [Kill(number=0), Kill(number=1)]),
        more({"operator": Counts, "accumulate": 2, **BUCKETS}, [Kill(number=0, place="after", step=3)]),
        more({"operator": Changes, "config": {"norm": True}, **BUCKETS}, [Kill(number=n) for n in (0, 1, 3)]),
        more({"operator": Changes, "config": {"norm": True}, "accumulate": 3, **BUCKETS}, [Kill(number=1, step=5)]),
    ],
    ids=[
        "ddp",
        "each call",
        "window",
        "pieces",
        "clip_norm",
        "on_nonfinite",
        "fp16",
        "counts",
        "counts of windows",
        "all that a step changes",
        "all that a window changes",
    ],
)
def test_kills_in_a_step(given: dict[str, Any], kills: Sequence[Any]) -> None:
    with trainer(**given) as run:
        ground = Ground(run, given.get("workers", 3))
        assert ground.result.get("skipped_steps", 0) == ("spoils" in given.get("config", {}))
        for each in kills:
            ground.kill(*(each if isinstance(each, tuple) else [each]))


@pytest.mark.more
@pytest.mark.parametrize(
    ("given", "kill", "made"),
    [
        ({"operator": OwnStep}, Kill(number=2, place="before"), 3),
        ({"operator": OwnStep}, Kill(number=2), 4),
        ({"config": {"calls": "before"}}, Kill(), 3),
        ({"config": {"calls": "before"}}, Kill(number=3), 4),
    ],
    ids=["own step", "own step made", "call before", "last bucket"],
)
def test_user_code_outside_the_contract(given: dict[str, Any], kill: Kill, made: int, tmp_path: Path) -> None:
    """Fewer workers have smaller batches then, as after a resize between these steps. A rank that is killed in a call waits until the
    first one has everything."""
    awaited = tmp_path / "received" if kill.place == "in" else None
    kills = [replace(kill, file=awaited), Mark(number=kill.number, place="after", rank=0, file=awaited)]
    with trainer(elastic={"batch": "per_worker"}, **given, **BUCKETS) as run:
        ground = Ground(run, 3)
        ground.restore()
        ground.lay(*(kills if awaited else [kill]))
        run.train()
        assert [(each.in_place, each.batches_redone) for each in run.recoveries] == [(True, 0)]
        found = ground.states()
    with trainer(backend="gloo", elastic={"batch": "per_worker"}, **given, **BUCKETS) as run:
        run.train(num_steps=made)
        run.resize(2)
        run.train()
        found += [run.apply_all_operators(state_of)[0]]
    for state in found:
        torch.testing.assert_close(state, found[0], rtol=1e-12, atol=1e-15)


def halves(ground: Ground, between: Any) -> None:
    """Train an epoch's samples, and do this in the middle. It must not change what the ranks have."""
    ground.restore()
    ground.trainer.train(num_steps=4)
    between()
    ground.trainer.train()
    assert ground.difference() < 1e-15


@pytest.mark.more
@pytest.mark.parametrize("kill", [Kill(step=None), Kill("broadcast", rank=0, step=None), Kill("all_gather", step=None)])
def test_a_survivor_is_killed_while_a_replacement_joins(kill: Kill) -> None:
    def between() -> None:
        run.resize(2)
        ground.lay(kill)
        run.resize(3)
        assert run.world_size == 2 and "worker death" in [each.reason for each in run.recoveries]

    with trainer(**BUCKETS) as run:
        ground = Ground(run, 3)
        halves(ground, between)


@pytest.mark.parametrize("kill", [Kill(), more(Kill("broadcast", 0, "before"))])
def test_a_replacement_is_killed_while_it_joins(kill: Kill, tmp_path: Path) -> None:
    def between() -> None:
        run.resize(2)
        (tmp_path / "next").touch()
        run.resize(3)
        assert run.world_size == 3 and not (tmp_path / "next").exists()

    with trainer(dies=(tmp_path / "next", kill), **BUCKETS) as run:
        ground = Ground(run, 3)
        halves(ground, between)


def test_torchs_watchdog_ends_no_survivor() -> None:
    """It sees the end of the peer's connection before the abort, and would end the process a second later."""
    with trainer(emulated={"network": True, "poll_s": 0.0001}, **DDP) as run:
        ground = Ground(run, 3)
        ground.kill(Kill(number=3))
        seen = run.apply_all_operators(lambda operator: emulation().noticed)
        pids = run.apply_all_workers(os.getpid)
        time.sleep(1.5)
        assert any(seen) and all(map(alive, pids)) and len(run.recoveries) == 1


@pytest.mark.more
@pytest.mark.parametrize("hangs", [{2}, {0, 1, 2}], ids=["one", "all"])
def test_an_abort_that_hangs(hangs: set[int]) -> None:
    """The processes end that wait for it in vain. One of them keeps the state: its abort ends when the others have ended."""
    with trainer(emulated={"hanging_ranks": hangs}, abort_s=(0.5, 4.0), **BUCKETS) as run:
        ground = Ground(run, 3)
        ground.restore()
        ground.lay(Kill(number=1))
        run.train()
        assert run.world_size == 1 and sum(each.seconds for each in run.recoveries) < 9
        assert {(each.in_place, each.batches_redone) for each in run.recoveries} == {(True, 0)}
        assert ground.difference() < 1e-15

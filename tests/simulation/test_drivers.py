"""Trainers with a name in virtual time: their script ends, is stopped, or is started twice, among other faults."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.driver_mutants import MUTANTS, seeds_needed
from tests.simulation.plan import Fault, Plan, named_plan_for
from tests.simulation.scenario import run
from tests.tiers import NIGHTLY

SEEDS = 20_000 if NIGHTLY else 400

# Shortened schedules that broke a guarantee once, by what was wrong.
FOUND = {
    "ranks that had begun other calls were given the number of one of them": Plan(
        seed=2701,
        ranks=3,
        nodes=(3, 1),
        samples=1,
        step_s=0.3,
        orphan_s=20.0,
        script=("train 8",),
        faults=(Fault("die", "data", count=7), Fault("ctrl-c", "in train", count=8)),
    ),
    "a preempted worker did not tell the next driver": Plan(
        seed=2148,
        ranks=1,
        nodes=(3, 2, 1),
        samples=1,
        step_s=0.3,
        late=0.1,
        orphan_s=20.0,
        faults=(Fault("drain", "in start", count=3), Fault("die", "send")),
    ),
    "a script took over workers that had begun again, with the record from before": Plan(
        seed=51,
        ranks=3,
        nodes=(3,),
        samples=4,
        step_s=0.3,
        retries=2,
        orphan_s=60.0,
        script=("save", "train"),
        faults=(
            Fault("cut", "attach ended", count=6, seconds=8.0),
            Fault("die", "keeper", count=9),
            Fault("die", "in train", count=3, seconds=4.0),
            Fault("die", "in save", count=3),
        ),
    ),
    "the rest of a call that had returned was left out, because all workers had failed since": Plan(
        seed=62971,
        nodes=(1, 2, 1),
        samples=39,
        batch=2,
        step_s=0.01,
        late=0.1,
        min_workers=2,
        grow=False,
        snapshot_every=1,
        retries=1,
        orphan_s=60.0,
        script=("train", "save", "fit 5", "apply", "fit 3", "resize 1"),
        faults=(
            Fault("kill", "attach ended", count=8, pick=8, seconds=8.0),
            Fault("die", "submit", count=22, pick=62, seconds=25.0),
            Fault("kill", "in save", count=2, others=16, pick=23, seconds=4.0),
        ),
    ),
    "workers that had stopped were killed by a driver that had been stopped in the middle of that order": Plan(
        seed=74438,
        ranks=3,
        nodes=(3,),
        samples=43,
        batch=2,
        step_s=0.3,
        late=0.1,
        min_workers=3,
        grow=False,
        orphan_s=5.0,
        script=("train",),
        faults=(Fault("suspend", "send", count=4, pick=2, seconds=33.34), Fault("ctrl-c", "in train", count=7)),
    ),
    "a driver that was stopped while it renewed its lease ended a worker of its successor": Plan(
        seed=222970,
        ranks=6,
        nodes=(3, 1, 2),
        samples=1,
        step_s=0.3,
        late=0.1,
        orphan_s=600.0,
        script=(),
        faults=(
            Fault("suspend", "submit", count=17, seconds=40.0),
            Fault("suspend", "keeper", count=2, pick=35, seconds=40.0),
        ),
    ),
    "all workers failed after a takeover, before there was a snapshot": Plan(
        seed=50871,
        ranks=3,
        nodes=(1, 1, 1),
        samples=24,
        late=0.1,
        grow="epoch",
        spares=1,
        orphan_s=20.0,
        script=("save", "train", "load 0", "train 4", "resize 2", "train 16"),
        faults=(
            Fault("kill", "data", count=31, others=2, pick=15),
            Fault("die", "in rendezvous", count=14, pick=53, seconds=8.0),
            Fault("die", "forward", count=29, pick=42, seconds=4.0),
        ),
    ),
    "a script ended while it did work of a call again that had returned, and the next one did not finish that": Plan(
        seed=517452,
        ranks=1,
        nodes=(1,),
        samples=17,
        global_batch=2,
        step_s=0.3,
        late=0.1,
        orphan_s=600.0,
        script=("train 2", "fit 5", "load 0", "train"),
        faults=(Fault("disconnect", "in load"), Fault("die", "forward", count=12)),
    ),
    "a script that had lost its trainer kept the workers until its next call": Plan(
        seed=571874,
        samples=1,
        step_s=0.3,
        orphan_s=60.0,
        script=("idle",),
        faults=(Fault("suspend", "in idle", pick=39, seconds=29.91),),
    ),
    "a driver that was stopped while it asked killed a worker that could not answer": Plan(
        seed=536204,
        ranks=3,
        nodes=(1, 1, 2),
        samples=4,
        step_s=0.3,
        late=0.1,
        orphan_s=20.0,
        faults=(Fault("suspend", "submit", count=21, pick=55, seconds=29.82), Fault("notice", "in rendezvous", 6, 1)),
    ),
    "a worker that no driver could reach since training began again was taken over with its old state": Plan(
        seed=523333,
        ranks=1,
        nodes=(1,),
        samples=26,
        step_s=0.01,
        late=0.1,
        orphan_s=60.0,
        script=("fit 3",),
        faults=(
            Fault("add", "save"),
            Fault("cut", "adopted", seconds=8.0),
            Fault("die", "in train", count=19),
            Fault("die", "in train", count=20),
        ),
    ),
    "a rank's metrics were lost, because its driver ended between the answer and the checkpoint": Plan(
        seed=303380,
        nodes=(1,),
        later=((6.7, 1),),
        samples=33,
        batch=2,
        late=0.1,
        orphan_s=600.0,
        script=("save", "fit 2"),
        faults=(Fault("die", "in train", count=21),),
    ),
    "workers that the last driver had given up had ended the call that the next one continued": Plan(
        seed=407004,
        ranks=1,
        nodes=(1,),
        samples=11,
        step_s=0.3,
        late=0.1,
        retries=0,
        orphan_s=20.0,
        script=("fit 5",),
        faults=(Fault("die", "in recovery"), Fault("cut", "answered", seconds=25.0)),
    ),
    "a checkpoint was to have what workers had measured that the script before the last one had": Plan(
        seed=620972,
        ranks=1,
        nodes=(1,),
        samples=16,
        step_s=0.01,
        late=0.1,
        in_place=False,
        orphan_s=60.0,
        script=("fit 1",),
        faults=(Fault("die", "applied", count=7), Fault("die", "in train", count=27)),
    ),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a takeover collects: all objects of the tests' process, here
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.timeout(3600 if NIGHTLY else 900)
def test_schedules_of_faults_break_no_guarantee() -> None:
    """`python -m tests.simulation --named --seed 17` prints all events of one."""
    takeovers = 0
    for seed in range(SEEDS):
        plan = named_plan_for(seed)
        result = run(plan)
        if result.error is not None:
            raise AssertionError(f"seed {seed}, {plan}: {result.error}") from result.error
        takeovers += sum(each.reason == "takeover" for each in result.recoveries)
    assert takeovers > SEEDS / 10


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_what_was_found_once_stays_fixed(plan: Plan) -> None:
    result = run(plan)
    assert result.error is None and result.struck
    assert run(replace(plan, shares=True)).error is None


def test_training_continues_in_the_middle_of_the_epoch() -> None:
    faults = (Fault("die", "applied", count=20),)
    result = run(Plan(ranks=3, nodes=(3,), samples=60, orphan_s=20.0, script=("train", "train"), faults=faults))
    assert result.error is None and result.redone == 0
    assert [(each.reason, each.world_size_after, each.batches_redone) for each in result.recoveries] == [
        ("takeover", 3, 0)
    ]


def test_training_continues_with_workers_that_the_last_driver_could_not_reach() -> None:
    """It gave them up. They get the call that it had made when their machine answers again, after its end."""
    faults = (Fault("partition", "in idle", count=4, seconds=25.0), Fault("die", "in recovery"))
    result = run(
        Plan(
            seed=412983,
            ranks=1,
            nodes=(1,),
            samples=2,
            step_s=0.01,
            orphan_s=5.0,
            script=("idle", "train"),
            faults=faults,
        )
    )
    assert result.error is None and (result.steps, result.redone) == (2, 0)


@pytest.mark.parametrize(("seconds", "lives"), [(4.0, True), (25.0, False)])
def test_orphans_wait_for_as_long_as_they_were_told_to(seconds: float, lives: bool) -> None:
    faults = (Fault("die", "applied", count=20, seconds=seconds),)
    result = run(Plan(ranks=3, nodes=(3,), samples=60, orphan_s=5.0, script=("train",), faults=faults))
    assert result.error is None and (result.redone == 0) is lives
    assert [each.reason for each in result.recoveries] == ["takeover"] * lives


def test_a_driver_that_was_stopped_continues_if_nobody_has_taken_over() -> None:
    faults = (Fault("suspend", "applied", count=20, seconds=60.0),)
    result = run(Plan(ranks=3, nodes=(3,), samples=60, orphan_s=90.0, script=("train",), faults=faults))
    assert result.error is None and result.redone == 0
    assert "takeover" not in [each.reason for each in result.recoveries]


def test_a_driver_that_is_stopped_while_a_state_moves_does_not_delay_the_next_one() -> None:
    """The worker that takes it stops waiting when its driver does not answer."""
    faults = (Fault("suspend", "load", pick=1, seconds=70.0),)
    script = ("resize 1", "train", "resize 2", "train")
    result = run(Plan(ranks=2, nodes=(2,), samples=60, orphan_s=90.0, script=script, faults=faults), tracing=True)
    assert result.error is None and result.redone == 0, result.error
    assert any("DRIVER of term 2 begins" in line for line in result.trace)


def test_a_driver_that_is_stopped_while_workers_start_does_not_delay_the_next_one() -> None:
    """They cannot connect to it, and end when another one may take over."""
    faults = (Fault("suspend", "process start", count=3, pick=1, seconds=70.0),)
    script = ("resize 1", "train", "resize 2", "train")
    result = run(Plan(ranks=2, nodes=(2,), samples=60, orphan_s=90.0, script=script, faults=faults), tracing=True)
    assert result.error is None and result.redone == 0, result.error
    assert any("w3 ends (it cannot connect to its driver)" in line for line in result.trace)


def test_the_driver_that_returns_finds_that_another_one_has_its_workers() -> None:
    faults = (Fault("suspend", "applied", count=20, pick=1, seconds=40.0),)
    result = run(
        Plan(ranks=3, nodes=(3,), samples=60, step_s=0.3, orphan_s=90.0, script=("train",) * 3, faults=faults),
        tracing=True,
    )
    assert result.error is None and result.redone == 0 and [each.reason for each in result.recoveries] == ["takeover"]
    assert any("another script has taken over" in line for line in result.trace)


def test_a_second_script_is_refused_while_the_first_one_runs() -> None:
    faults = (Fault("rival", "applied", count=5),)
    result = run(
        Plan(ranks=2, samples=60, step_s=0.3, orphan_s=20.0, script=("train",) * 2, faults=faults), tracing=True
    )
    assert result.error is None and not result.recoveries
    assert any("gives up" in line for line in result.trace)


@pytest.mark.parametrize("name", ["grant_a_lease_that_holds", "renew_a_term_that_is_over", "end_with_the_driver"])
def test_a_broken_takeover_is_detected(name: str) -> None:
    assert seeds_needed(name, 200)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_takeover_is_detected(name: str) -> None:
    assert seeds_needed(name, 10_000)

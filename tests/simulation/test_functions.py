"""Training functions in virtual time, under schedules of faults. The checks would detect a broken function API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.function_mutants import MUTANTS, seeds_needed
from tests.simulation.functions import FunctionPlan, function_plan_for, run_function
from tests.simulation.plan import Fault
from tests.tiers import NIGHTLY

SEEDS = 5000 if NIGHTLY else 150

# Shortened schedules that broke a guarantee once, by what was wrong.
FOUND = {
    "a worker that failed in a hook of the backend ended the run": FunctionPlan(
        ranks=3,
        nodes=(3,),
        grow=False,
        faults=(Fault("kill", "compute", count=4), Fault("kill", "setup hook", count=4)),
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.timeout(1800 if NIGHTLY else 900)
def test_schedules_of_faults_break_no_guarantee() -> None:
    """To see all events of a seed, print `run_function(function_plan_for(seed), tracing=True).trace`."""
    struck, shared = 0, 0
    for seed in range(SEEDS):
        result = run_function(function_plan_for(seed))
        if result.error is not None:
            raise AssertionError(f"seed {seed}, {result.plan}: {result.error}") from result.error
        struck += result.struck.total()
        shared += len({generation for generation, _ in result.seen}) > 1
    assert struck > SEEDS and shared > SEEDS / 20, "the faults hit something, and functions run again after them"


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_what_was_found_once_stays_fixed(plan: FunctionPlan) -> None:
    result = run_function(plan)
    assert result.error is None
    assert result.struck.total() == len(plan.faults)
    assert run_function(replace(plan, shares=True)).error is None


def test_the_ranks_continue_from_the_newest_checkpoint_after_a_failure() -> None:
    result = run_function(
        FunctionPlan(ranks=2, nodes=(2,), grow=False, steps=5, faults=(Fault("kill", "report", count=6),))
    )
    assert result.error is None
    assert [step for _, step in result.seen] == [0, 1, 2, 3, 4]
    assert [each.reason for each in result.recoveries] == ["worker death"]


def test_a_seed_always_gives_the_same_run() -> None:
    first, second = (run_function(function_plan_for(17), tracing=True).trace for _ in range(2))
    assert first == second and len(first) > 30


# Each mutant breaks the function API in one way, which its name says.


@pytest.mark.parametrize("name", ["accept_reports_of_an_earlier_attempt", "begin_again_without_a_checkpoint"])
def test_a_broken_function_api_is_detected(name: str) -> None:
    assert seeds_needed(name, 150)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_function_api_is_detected(name: str) -> None:
    assert seeds_needed(name, 600)

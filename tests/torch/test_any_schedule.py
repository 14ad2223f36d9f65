"""Whatever happens to the workers, the weights are those of an undisturbed run. Real replicas, in one process.

A test's number determines its run: `make test ARGS='tests/torch/test_any_schedule.py -k "schedule[17]"'` repeats one. It prints
its schedule if it fails.
"""

import logging
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.local.group import Fault
from tests.peek import change_order
from tests.torch.schedules import MOST, Noted, Setting, by_hand, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
]

QUICK, SEEDS = 10, 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Give all sums of a run the same number of threads, and do not let the models' small operations wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("raysgd").disabled = True
    yield
    logging.getLogger("raysgd").disabled = False
    torch.set_num_threads(before)


def seeds(quick: int, total: int) -> list[Any]:
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(quick, total))]


@pytest.mark.parametrize("seed", seeds(QUICK, SEEDS))
def test_any_schedule(seed: int) -> None:
    setting = Setting.draw(seed)
    print(setting)
    weights, steps = trained(setting)
    for epoch in steps:
        used = [sample for step in epoch for sample in step]
        assert sorted(used) == list(range(setting.rows)), "every sample is used once"
    expected = by_hand(setting, steps)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{text}\n{setting}")
    if setting.mode == "auto":
        undisturbed, same = trained(setting, undisturbed=True)
        assert steps == same, "the steps are those of an undisturbed run"
        torch.testing.assert_close(weights, undisturbed, rtol=1e-12, atol=1e-12, msg=lambda text: f"{text}\n{setting}")


def reordered(seed: int, together: int) -> Any:
    """Replace the order of the samples by one in which those of each step, of this many samples, are permuted."""

    def permuted(order: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.as_tensor(order).split(together)
        return torch.cat([step[torch.randperm(len(step), generator=generator)] for step in steps])

    return change_order(permuted)


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.nightly)])
def test_single_precision_differs_as_other_orders_of_the_sums_do(count: int) -> None:
    disturbed, orders = [], []
    for seed in range(count):
        setting = Setting.draw(1000 + seed, double=False, mode="auto")
        print(setting)
        runs = [trained(setting, undisturbed=True)[0]]
        for order in (1, 2, 3):
            with reordered(order, setting.workers * setting.batch):
                runs.append(trained(setting, undisturbed=True)[0])
        found = trained(setting)[0]
        others = [float((runs[0] - each).abs().max()) for each in runs[1:]]
        disturbed.append(float((runs[0] - found).abs().max()))
        orders.append(statistics.median(others))
        # One pair of runs is a matter of chance: a single rounding error that grows decides it.
        assert disturbed[-1] <= 10 * max(*others, 1e-7), setting
    assert statistics.mean(disturbed) <= 1.5 * statistics.mean(orders)


@pytest.mark.parametrize(("at", "rates"), [("begun", "onecycle"), ("reduced", "cosine")])
def test_batches_that_are_trained_again_step_their_schedule_once(at: str, rates: str) -> None:
    """A rank fails in the second of two batches that share an optimizer step, after the schedule's step of the first one."""
    fault = Fault("kill", at, rank=1, step=3)
    setting = Setting(5, rows=36, accumulate=2, rates=rates, optimizer="adam", faults=(fault,))
    torch.testing.assert_close(trained(setting)[0], trained(setting, undisturbed=True)[0], rtol=1e-12, atol=1e-12)


def test_the_end_of_a_call_is_in_a_snapshot_although_the_first_rank_failed_then() -> None:
    """The others have ended the call. Then all fail, in the next call."""
    every = tuple(Fault("kill", "begun", rank=rank, step=1) for rank in range(MOST))
    setting = Setting(6, rows=6, faults=(Fault("kill", "applied", rank=0, step=0), *every))
    weights, steps = trained(setting)
    undisturbed, same = trained(setting, undisturbed=True)
    assert steps == same
    torch.testing.assert_close(weights, undisturbed, rtol=1e-12, atol=1e-12)


FAULTS = (
    Fault("kill", "begun", rank=1, step=1),
    Fault("notice", "begun", rank=0, step=3),
    Fault("kill", "applied", rank=0, step=6),
)
FIXED = Setting(11, rows=36, batch=3, workers=3, faults=FAULTS)


class Normalized(Noted):
    frozen = False

    def augment(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.model[1].train(not self.frozen)
        return x


class Frozen(Normalized):
    frozen = True


class Dropping(Noted):
    def augment(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


class DroppingBySample(Noted):
    def augment(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = []
        for number, row in zip(index, x, strict=True):
            with self.sample_rng(number):
                rows.append(nn.functional.dropout(row, 0.5))
        return torch.stack(rows)


@pytest.mark.parametrize("operator", [Normalized, Frozen, Dropping, DroppingBySample])
def test_what_is_computed_with_a_part_does_not_depend_on_who_computes_it(operator: type[Noted]) -> None:
    setting = replace(FIXED, model="batchnorm") if issubclass(operator, Normalized) else FIXED
    mine, steps = trained(setting, operator)
    other, same = trained(setting, operator, undisturbed=True)
    assert steps == same
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    again, _ = trained(setting, operator)
    assert torch.equal(mine, again), "the same faults at the same steps lead to the same weights"

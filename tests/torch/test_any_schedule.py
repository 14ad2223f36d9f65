"""Whatever happens to the workers, the weights are those of an undisturbed run. Real replicas, in one process.

A test's number determines its run: `make test ARGS='tests/torch/test_any_schedule.py -k "schedule[17]"'` repeats one. It prints
its schedule if it fails.
"""

import logging
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.local.group import Fault
from tests.peek import change_order
from tests.torch.schedules import EPOCHS, IGNORED, MOST, Move, Noted, Setting, by_hand, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
]

QUICK, SEEDS = 20, 200


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
    shown, undisturbed = trained(setting), trained(setting, undisturbed=True)
    for each in undisturbed.entered, *([shown.entered] if setting.mode == "auto" else []):
        check_entered(setting, each)
    if setting.mode == "auto":
        assert not shown.differences(undisturbed, 1e-9)
    else:
        for epoch in shown.steps:
            assert sorted(sample for step in epoch for sample in step) == list(range(setting.rows))
    compared = undisturbed if setting.mode == "auto" else shown
    if setting.by_samples:
        torch.testing.assert_close(compared.weights, by_hand(setting, compared.steps), rtol=1e-9, atol=1e-9)


def check_entered(setting: Setting, epochs: list[torch.Tensor]) -> None:
    """Each sample of a step weighs as much as the others, unless its loss is a mean over something else; together they weigh 1."""
    for entered, sizes in zip(epochs, setting.windows(), strict=True):
        expected = torch.tensor(sorted(1 / size for size in sizes for _ in range(size)), dtype=torch.float64)
        if setting.model == "ragged":
            entered, expected = entered.sum(), torch.tensor(float(len(sizes)), dtype=torch.float64)
        torch.testing.assert_close(entered.sort()[0] if entered.dim() else entered, expected, rtol=1e-12, atol=1e-12)


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
        setting = Setting.draw(1000 + seed, double=False, mode="auto", moves=())
        print(setting)
        runs = [trained(setting, undisturbed=True).weights]
        for order in (1, 2, 3):
            with reordered(order, setting.parts * setting.batch):
                runs.append(trained(setting, undisturbed=True).weights)
        found = trained(setting).weights
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
    assert not trained(setting).differences(trained(setting, undisturbed=True), 1e-12)


def test_the_end_of_a_call_is_in_a_snapshot_although_the_first_rank_failed_then() -> None:
    """The others have ended the call. Then all fail, in the next call."""
    every = tuple(Fault("kill", "begun", rank=rank, step=1) for rank in range(MOST))
    setting = Setting(6, rows=6, faults=(Fault("kill", "applied", rank=0, step=0), *every))
    assert not trained(setting).differences(trained(setting, undisturbed=True), 1e-12)


def test_a_rank_that_had_not_begun_a_call_counts_nothing_of_the_one_before() -> None:
    """One fails when the call begins, and its peers while they still compare their rows before that. Before, they counted what the
    script had trained that wrote the checkpoint."""
    setting = Setting(
        66, batch=4, faults=(Fault("kill", "begun", rank=1, step=1),), moves=(Move(0, 1), Move(1, 3, loads=True))
    )
    shown = trained(setting)
    assert [each["num_samples"] for each in shown.results] == [12, 8, 20, 20]
    assert not shown.differences(trained(setting, undisturbed=True), 1e-12)


class Overflows(Noted):
    """Its scale grows with each step until one overflows. Some runs pass the counts themselves."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self._amp_scaler is not None:
            self._amp_scaler.load_state_dict({**self._amp_scaler.state_dict(), "growth_interval": 1})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.kept = int((batch[2] != IGNORED).sum())
        return super().train_batch(batch, batch_info)

    def backward(self, loss: torch.Tensor, optimizer: Any = None, **given: Any) -> None:
        if self.setting.model == "ragged" and self.setting.seed % 2:
            given["count"] = self.kept
        super().backward(loss, optimizer, **given)


def killed(seed: int, **given: Any) -> Setting:
    """Draw a run in which one to three ranks are killed."""
    draw = random.Random(seed)
    if "finer" in given:
        given["parts"], given["batch"] = draw.choice([(2, 3), (3, 2), (6, 1), (3, 4)])
    setting = Setting.draw(seed, **{"double": False, "mode": "auto", "moves": (), "faults": (), **given})
    points = sorted(draw.randrange(EPOCHS * setting.steps) for _ in range(draw.randint(1, 3)))
    at = ["begun", "forward", "reduced", "applied"]
    kills = [Fault("kill", draw.choice(at), rank=draw.randrange(setting.parts), step=step) for step in points]
    # BatchNorm's buffers are sent before each optimizer's step. If a rank fails there, the others may have made the step of the first
    # of two optimizers; and the simulated group, unlike torch's, is forgotten then.
    model = "conv" if setting.model == "batchnorm" else setting.model
    return replace(setting, model=model, faults=tuple(kills), grow=draw.random() < 0.5)


WEIGHED: dict[str, dict[str, Any]] = {"counts": {"model": "ragged"}, "windows": {"accumulate": 3, "finer": 6}}


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("weighed", WEIGHED)
@pytest.mark.parametrize("seed", seeds(4, SEEDS))
def test_the_same_steps_overflow_whoever_computes_their_parts(seed: int, weighed: str, precision: str) -> None:
    setting = killed(seed, precision=precision, **WEIGHED[weighed])
    print(setting)
    shown, undisturbed = trained(setting, Overflows), trained(setting, Overflows, undisturbed=True)
    assert [each.get("skipped_steps") for each in shown.results] == [
        each.get("skipped_steps") for each in undisturbed.results
    ]
    assert not shown.differences(undisturbed, 1e-3)

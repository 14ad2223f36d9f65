"""A schedule that the trainer steps has the planned learning rate for each sample, whatever happens to the workers.

One replica stands for rank 0 of each group. The rates expected are those of a plain loop over all batches that were planned.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from raysgd import ElasticConfig, TrainingOptions
from tests.replicas import Interrupted, OperatorRank, torch_rank
from tests.torch.small import Line, rows

EPOCHS, ROWS, BATCH = 3, 52, 4


def cosine(optimizer: Any, steps: int) -> Any:
    return CosineAnnealingLR(optimizer, T_max=steps)


def one_cycle(optimizer: Any, steps: int) -> Any:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def in_sequence(optimizer: Any, steps: int) -> Any:
    warm_up = LinearLR(optimizer, 0.1, total_iters=steps // 4)
    return SequentialLR(optimizer, [warm_up, cosine(optimizer, steps - steps // 4)], milestones=[steps // 4])


def chained(optimizer: Any, steps: int) -> Any:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=steps // 4), cosine(optimizer, steps)])


def _warm_up(step: int, *, steps: int) -> float:
    return min((step + 1) / (steps / 4), 1 - step / (steps + 1))


def of_a_function(optimizer: Any, steps: int) -> Any:
    return LambdaLR(optimizer, partial(_warm_up, steps=steps))  # as those of transformers


KINDS = [cosine, one_cycle, in_sequence, chained, of_a_function]


class Planned(Line):
    """Keeps the learning rate of each batch, and which step planned for two workers has its first sample. Steps the schedule itself if
    `config["own"]` is set."""

    def setup(self, config: dict[str, Any]) -> None:
        self.rates, self.places, self.batches = list[float](), list[int](), 0
        super().setup({**config, "scheduler": self.scheduled})

    def scheduled(self, optimizer: Any) -> Any:
        self.total_steps(1)  # for a warm-up, for example
        self.planned = self.total_steps(EPOCHS, self.config.get("num_steps"))
        return self.config.get("kind", cosine)(optimizer, self.planned)

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data, how = TensorDataset(*rows(ROWS)), {"batch_size": BATCH, "drop_last": config.get("drop_last", False)}
        if config.get("own_batches"):
            how = {"batch_sampler": BatchSampler(RandomSampler(data), BATCH, drop_last=False)}
        return {"train_loader": DataLoader(data, **how)}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        row = round(float(batch[0][0, 0]) * 10)
        self.places.append(batch_info["epoch_idx"] * (self.planned // EPOCHS) + row // (2 * BATCH))
        result = super().train_batch(batch, batch_info)
        self.batches += 1
        if self.config.get("own") and self.batches % self.config["accumulate"] == 0:
            self.scheduler.step()  # type: ignore[union-attr]
        return result


def replica_of(present: int, workers: int = 2, freq: str = "batch", **config: Any) -> OperatorRank:
    elastic = ElasticConfig(batch=config.pop("mode", "per_worker"))
    config.setdefault("accumulate", 1)
    options = TrainingOptions(precision="fp32", accumulate=config["accumulate"])
    how: dict[str, Any] = {"elastic": elastic, "options": options, "scheduler_step_freq": freq}
    return torch_rank(Planned, config, ranks=present, num_workers=workers, **how)


def undisturbed(kind: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)
    scheduler, rates = kind(optimizer, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


CHANGES = {
    "undisturbed": [(None, 2)],
    "one of two failed, and was replaced": [(2, 2), (5, 1), (None, 2)],
    "growth": [(4, 2), (None, 5)],
    "a resize": [(3, 2), (4, 4), (11, 1), (1, 3), (None, 2)],
    "always fewer": [(None, 1)],
}


def run(changes: list[tuple[int | None, int]], *, restart: bool = False, **config: Any) -> OperatorRank:
    """Train a run, one call for each epoch. Each entry is a number of batches (None: the rest) and the workers that make them. With
    `restart`, another replica continues after each change."""
    replica, call = replica_of(changes[0][1], **config), 1
    for number, (count, world) in enumerate(changes):
        if number and restart:
            old, replica = replica, replica_of(world, **config)
            replica.load(old.state())
            replica.operator.rates, replica.operator.places = old.operator.rates, old.operator.places
        replica.rejoin(ranks=world)
        until = None if count is None else replica.progress.step + count
        while call <= EPOCHS and not isinstance(replica.train(call, pause_at=until), Interrupted):
            call += 1
    return replica


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_has_the_planned_rate_of_its_first_sample(kind: Any) -> None:
    for number, (changes, restart) in enumerate(product(CHANGES.values(), (False, True))):
        drop_last = number % 4 in (1, 2)  # with and without a restart
        operator = run(changes, restart=restart, kind=kind, drop_last=drop_last).operator
        expected = undisturbed(kind, operator.planned)
        assert operator.rates == [expected[place] for place in operator.places]
        assert operator.optimizer.param_groups[0]["lr"] == expected[-1]  # the schedule ends with the run


@pytest.mark.parametrize("how", [{}, {"own_batches": True}])
def test_calls_of_whole_epochs_and_batches_of_the_users_sampler(how: Any) -> None:
    """The number of batches does not matter, nor in which calls they are trained."""
    for changes in CHANGES.values():
        replica = run([(3, changes[0][1])], **how)
        replica.rejoin(ranks=changes[-1][1])
        for call in range(10, 10 + EPOCHS):
            replica.train(call)
        rates = replica.operator.rates
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] > replica.operator.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("kind", [one_cycle, in_sequence, of_a_function])
def test_a_checkpoint_continues_on_another_number_of_workers(kind: Any, workers: int) -> None:
    """A schedule continues with the length in its state. A function has the length that the new run has planned."""
    replica = run([(10, 2)], kind=kind)
    resumed = replica_of(workers, workers, kind=kind).resume(replica.checkpoint())
    for call in range(100, 100 + EPOCHS - 1):
        resumed.train(call)
    operator = resumed.operator
    step_size = BATCH * (workers if kind is of_a_function else 2)
    per_epoch = -(-ROWS // step_size)
    expected = undisturbed(kind, EPOCHS * per_epoch)
    offsets = range(3 * 8, ROWS, workers * BATCH), range(0, ROWS, workers * BATCH)  # of epochs 2 and 3
    places = [epoch * per_epoch + offset // step_size for epoch in (1, 2) for offset in offsets[epoch - 1]]
    assert operator.rates[0] == undisturbed(kind, 21)[10]  # that of the state
    assert operator.rates[1:] == [expected[place] for place in places[1:]]
    assert operator.optimizer.param_groups[0]["lr"] == expected[-1]


def test_schedules_of_epochs_and_of_a_number_of_steps_do_not_change() -> None:
    by_epoch = replica_of(1, freq="epoch")
    for call in range(EPOCHS):
        by_epoch.train(call)
    assert by_epoch.operator.scheduler.last_epoch == EPOCHS
    limited = replica_of(1, num_steps=5)
    for call in range(EPOCHS):
        limited.train(call, 5)
    assert limited.operator.rates == undisturbed(cosine, 15)[:-1]


def test_with_accumulation_a_schedule_of_steps_makes_one_for_each_window() -> None:
    expected = undisturbed(cosine, 9)
    for changes, restart in product(CHANGES.values(), (False, True)):
        operator = run(changes, restart=restart, freq="step", accumulate=3).operator
        assert operator.planned == operator.scheduler.last_epoch == 9
        assert operator.optimizer.param_groups[0]["lr"] == expected[-1]
        assert operator.rates == sorted(operator.rates, reverse=True) and set(operator.rates) <= set(expected)
        if changes == CHANGES["undisturbed"]:
            assert operator.rates == [expected[3 * epoch + batch // 3] for epoch in range(EPOCHS) for batch in range(7)]


def test_a_schedule_of_steps_after_a_failure_within_a_window() -> None:
    replica = replica_of(2, freq="step", accumulate=3)
    operator = replica.operator
    original = operator.train_batch

    def failing(batch: Any, batch_info: dict[str, Any]) -> Any:
        if operator.batches == 4:
            replica.interrupt()
        return original(batch, batch_info)

    operator.train_batch = failing
    assert isinstance(replica.train(0), Interrupted)
    replica.rejoin(ranks=2)
    for call in range(EPOCHS):
        replica.train(call)
    expected, (first, *others) = undisturbed(cosine, 9), [[0] * 3 + [1] * 3 + [2], [3] * 3 + [4] * 3 + [5]]
    places = [*first[:5], *first[3:], *others[0], *(each + 3 for each in others[0])]  # two batches are processed again
    assert operator.rates == [expected[place] for place in places]
    assert operator.scheduler.last_epoch == 9


# -- schedules that user code steps -------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each for each in caplog.messages if "total_steps() planned" in each]
    caplog.clear()
    return found


def test_one_warning_when_the_plan_of_the_users_steps_no_longer_holds(caplog: pytest.LogCaptureFixture) -> None:
    replica = replica_of(2, freq="manual", own=True)
    replica.train(0)
    replica.train(1, 3)
    assert not warnings(caplog)
    replica.rejoin(ranks=1)
    replica.train(2)  # 10 steps were made, and 28 samples of this epoch and 52 of the last one are left
    (warning,) = warnings(caplog)
    assert "planned 21 optimizer steps with num_workers=2. With 1 from now on, this run makes 30" in warning
    assert "ElasticConfig(batch='global')" in warning and "scheduler_step_freq='step'" in warning
    other = replica_of(1, freq="manual", own=True)
    other.load(replica.state())  # a replacement worker
    for each in (replica, other):
        each.rejoin(ranks=3)
        each.train(3)
        assert not warnings(caplog)


def test_a_run_that_is_resumed_gets_a_warning_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    replica = replica_of(2, freq="manual", own=True)
    replica.train(0)
    replica_of(2, freq="manual", own=True).resume(replica.checkpoint()).train(1)
    assert not warnings(caplog)
    replica_of(1, 1, freq="manual", own=True).resume(replica.checkpoint()).train(1)
    (warning,) = warnings(caplog)
    assert "planned 21 optimizer steps with num_workers=2. With 1 from now on, this run makes 33" in warning


def test_a_window_of_batches_is_a_step(caplog: pytest.LogCaptureFixture) -> None:
    replica = replica_of(2, freq="manual", own=True, accumulate=3)
    replica.train(0)
    assert not warnings(caplog)
    replica.rejoin(ranks=1)
    replica.train(1)
    assert "planned 9 optimizer steps with num_workers=2. With 1 from now on, this run makes 13" in warnings(caplog)[0]


def test_no_warning_where_the_plan_holds(caplog: pytest.LogCaptureFixture) -> None:
    hows: list[dict[str, Any]] = [{"freq": "batch"}, {"freq": "epoch"}]
    for how in (*hows, {"freq": "manual", "mode": "global"}, {"freq": "manual", "num_steps": 5}):
        replica = replica_of(2, **how)
        replica.train(0, how.get("num_steps"))
        replica.rejoin(ranks=1)
        replica.train(1, how.get("num_steps"))
    assert not warnings(caplog)

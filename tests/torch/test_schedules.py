"""Schedules that have too few steps, and who steps them.

One that the trainer steps and that is too short only because fewer workers trained, or a resumed run has more epochs, keeps its
last learning rate. Others raise their error.
"""

from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from raysgd import ConfigError, ElasticConfig, TrainingOptions
from tests.replicas import OperatorRank, torch_rank
from tests.torch.small import Line, inline, operator_of

EPOCHS, STEPS = 2, 4  # and batches in an epoch of two workers


def one_cycle(optimizer: Any, steps: int) -> Any:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def cosine(optimizer: Any, steps: int) -> Any:
    return CosineAnnealingLR(optimizer, T_max=steps)


def in_sequence(optimizer: Any, steps: int) -> Any:
    warm_up = ConstantLR(optimizer, factor=0.5, total_iters=2)
    return SequentialLR(optimizer, [warm_up, OneCycleLR(optimizer, max_lr=0.1, total_steps=steps - 2)], milestones=[2])


def from_a_table(optimizer: Any, steps: int) -> Any:
    table = [1.0 / (step + 1) for step in range(steps + 1)]
    return LambdaLR(optimizer, lambda step: table[step])


def with_a_mistake(optimizer: Any, steps: int) -> Any:
    return LambdaLR(optimizer, lambda step: 1.0 / (3 - step))


class Planned(Line):
    """Makes a schedule for `config["epochs"]`, or with `config["steps"]` steps; `config["often"]` is how often it steps after a batch."""

    def setup(self, config: dict[str, Any]) -> None:
        kind = config.get("kind", one_cycle)

        def made(optimizer: Any) -> Any:
            return kind(optimizer, config.get("steps") or self.total_steps(config.get("epochs", EPOCHS)))

        super().setup({"rows": 26, **config, "scheduler": made})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        for _ in range(self.config.get("often", 1) - 1):
            self.scheduler.step()  # type: ignore[union-attr]
        return result


def replica_of(num_workers: int, present: int, freq: str = "batch", **config: Any) -> OperatorRank:
    given: dict[str, Any] = {"num_workers": num_workers, "scheduler_step_freq": freq, "elastic": PER_WORKER}
    return torch_rank(Planned, config, ranks=present, **given)


def trained(rank: OperatorRank, calls: range) -> OperatorRank:
    for call in calls:
        rank.train(call)
    return rank


PER_WORKER = ElasticConfig(batch="per_worker", snapshot_every=None)  # so fewer workers make more steps
COUNTED: dict[str, Any] = {"steps": EPOCHS * STEPS}  # by hand: the trainer does not know that it is a plan
BY_USER: dict[str, Any] = {"freq": "manual", "often": 2}


def rate_of(rank: OperatorRank) -> float:
    return float(rank.operator.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("how", [COUNTED, *({"kind": kind} for kind in (one_cycle, cosine, in_sequence, from_a_table))])
def test_the_last_rate_is_held_if_fewer_workers_train(how: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    whole = trained(replica_of(2, 2, **how), range(EPOCHS))
    replica = trained(replica_of(2, 1, **how), range(EPOCHS))
    assert replica.progress.step == 14 > EPOCHS * STEPS == whole.operator.scheduler.last_epoch
    assert replica.operator.scheduler.last_epoch == EPOCHS * STEPS
    assert rate_of(replica) == rate_of(whole)
    (warning,) = caplog.messages
    name = type(replica.operator.scheduler).__name__
    assert f"{name} has made the 8 steps for which it was planned, and this call ends with step 14." in warning


def test_a_window_of_batches_is_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """13 batches of one worker are 5 windows of 3, and 7 of two workers are 3."""
    how: dict[str, Any] = {"scheduler_step_freq": "step", "options": TrainingOptions(precision="fp32", accumulate=3)}
    rank = torch_rank(Planned, {"kind": cosine, "rows": 52}, ranks=1, num_workers=2, elastic=PER_WORKER, **how)
    trained(rank, range(EPOCHS))
    assert rank.progress.applied == 10 and rank.operator.scheduler.last_epoch == 6
    assert rate_of(rank) == 0
    assert "made the 6 steps for which it was planned, and this call ends with step 10." in caplog.messages[0]


def test_a_schedule_that_begins_again_in_each_epoch_does_so() -> None:
    rank = trained(replica_of(2, 1, kind=cosine, epochs=1), range(EPOCHS))
    assert rank.operator.scheduler.last_epoch == STEPS + 7  # the first epoch has 3 steps more than planned


class Breaking(OneCycleLR):
    """Has an error of its own in the step after its last one, in which it must not be taken for too short."""

    def step(self, *given: Any) -> None:
        if self.last_epoch == EPOCHS * STEPS - 1:
            raise ZeroDivisionError
        super().step(*given)


@pytest.mark.parametrize(
    ("kind", "how", "error"),
    [
        (in_sequence, BY_USER, ValueError),
        (from_a_table, BY_USER, IndexError),
        (lambda optimizer, steps: Breaking(optimizer, max_lr=0.1, total_steps=steps), COUNTED, ZeroDivisionError),
    ],
)
def test_an_error_of_a_scheduler_is_the_users(kind: Any, how: Any, error: Any) -> None:
    with pytest.raises(error):
        trained(replica_of(2, 1, kind=kind, **how), range(EPOCHS))


def test_a_schedule_that_ends_for_another_reason_raises_its_error() -> None:
    with pytest.raises(ValueError, match="Tried to step"):
        trained(replica_of(2, 2), range(EPOCHS + 1))
    with pytest.raises(ValueError, match="Tried to step"):  # it steps too often
        trained(replica_of(2, 2, freq="manual", often=3), range(EPOCHS))
    with pytest.raises(ZeroDivisionError):  # before the end of the schedule
        trained(replica_of(2, 1, kind=with_a_mistake), range(EPOCHS))
    fewer = trained(replica_of(2, 1, **COUNTED), range(EPOCHS))
    with pytest.raises(ValueError, match="Tried to step"):  # more epochs than planned, with fewer workers
        trained(fewer, range(EPOCHS, EPOCHS + 1))
    with pytest.raises(ValueError, match="Tried to step"):  # the number of epochs does not depend on the workers
        trained(replica_of(2, 1, freq="epoch", kind=lambda optimizer, steps: one_cycle(optimizer, 3)), range(4))


def resumed(state: dict[str, Any], rank: OperatorRank) -> int:
    """Train the other epochs from this state. Return how many steps the schedule has made."""
    return int(trained(rank.resume(state), range(1, EPOCHS)).operator.scheduler.last_epoch)


def test_a_checkpoint_knows_the_number_of_workers() -> None:
    fewer, more = (trained(replica_of(2, present, **COUNTED), range(1)).checkpoint() for present in (1, 2))
    for state, rank in ((fewer, replica_of(2, 2, **COUNTED)), (fewer, replica_of(1, 1, **COUNTED))):
        assert resumed(state, rank) == EPOCHS * STEPS  # it needs 7 + 4 and 7 + 7 steps, and ends with its last rate
    assert resumed(more, replica_of(1, 1, **COUNTED)) == EPOCHS * STEPS
    with pytest.raises(ValueError, match="Tried to step"):
        resumed(more, replica_of(2, 2, freq="manual", often=3))


def steps_after_a_warm_up(optimizer: Any, steps: int) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=2), MultiStepLR(optimizer, [1, 3])], milestones=[2])


@pytest.mark.parametrize("blocking", [True, False])
def test_steps_after_a_warm_up_follow_a_load(blocking: bool, tmp_path: Path) -> None:
    """`MultiStepLR` keeps its milestones in a Counter, which it needs when it begins."""
    config = {"kind": steps_after_a_warm_up}
    with inline(Planned, config=config, scheduler_step_freq="epoch") as trainer:
        trainer.train()
        saved = trainer.save(tmp_path / "first.pt", blocking=blocking)
    with inline(Planned, config=config, scheduler_step_freq="epoch") as trainer:
        trainer.load(saved if blocking else saved.result())
        rates = [(trainer.train(), operator_of(trainer).optimizer.param_groups[0]["lr"])[1] for _ in range(4)]
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize("kind", [one_cycle, cosine])
def test_a_run_that_is_resumed_with_more_epochs_keeps_the_last_rate(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ended = trained(replica_of(1, 1, kind=kind), range(EPOCHS))
    longer = replica_of(1, 1, epochs=EPOCHS + 1, kind=kind).resume(ended.checkpoint())
    trained(longer, range(EPOCHS, EPOCHS + 1))
    assert longer.progress.step == 21 and longer.operator.scheduler.last_epoch == 14
    assert rate_of(longer) == rate_of(ended)
    warning = caplog.messages[-1]
    assert "made the 14 steps for which it was planned, and this call ends with step 21." in warning


def test_an_error_ends_more_epochs_than_planned() -> None:
    ended = trained(replica_of(1, 1), range(EPOCHS))
    with pytest.raises(ValueError, match="Tried to step"):
        trained(ended, range(EPOCHS, EPOCHS + 1))  # it was not planned


def test_a_resumed_schedule_has_the_length_in_its_checkpoint_and_a_function_that_of_the_code() -> None:
    state = trained(replica_of(2, 2, kind=cosine), range(1)).checkpoint()
    assert resumed(state, replica_of(1, 1, kind=cosine)) == EPOCHS * STEPS
    state = trained(replica_of(2, 2, kind=from_a_table), range(1)).checkpoint()
    assert resumed(state, replica_of(1, 1, kind=from_a_table)) == STEPS + 7


def test_a_checkpoint_fits_whether_or_not_the_steps_were_planned() -> None:
    planned, counted = ({}, {"steps": 14})
    for saved, here in ((planned, counted), (counted, planned)):
        state = trained(replica_of(1, 1, **saved), range(1)).checkpoint()
        assert resumed(state, replica_of(1, 1, **here)) == 14


def chained(optimizer: Any, steps: int) -> Any:
    return ChainedScheduler([ConstantLR(optimizer, total_iters=2), LambdaLR(optimizer, lambda step: 1 - step / 20)])


def users_own(optimizer: Any, steps: int) -> Any:
    class Halving:
        """Not one of torch's classes, and without a counter."""

        def step(self) -> None:
            optimizer.param_groups[0]["lr"] /= 2

        def state_dict(self) -> dict[str, Any]:
            return {}

    return Halving()


@pytest.mark.parametrize("kind", [one_cycle, in_sequence, from_a_table, chained])
def test_a_scheduler_that_train_batch_steps_too_is_an_error_in_its_first_batch(kind: Any) -> None:
    for freq in ("batch", "epoch"):
        replica = replica_of(1, 1, freq=freq, kind=kind, often=2)
        with pytest.raises(ConfigError, match=r"Planned.train_batch steps its .*freq='manual'"):
            trained(replica, range(1))
        assert replica.progress.step == 1
    trained(replica_of(1, 1, freq="manual", kind=kind, often=2), range(1))


@pytest.mark.parametrize("freq", ["batch", "epoch"])
def test_a_scheduler_that_only_the_loop_steps_is_none(freq: str) -> None:
    for kind in (one_cycle, in_sequence, from_a_table, chained, users_own):
        trained(replica_of(1, 1, freq=freq, kind=kind), range(EPOCHS))


class Listed(Line):
    """Keeps its schedulers in the list in which they were registered."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"scheduler": lambda optimizer: [ConstantLR(optimizer) for _ in range(config["count"])]})


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("freq", "steps"), [("batch", 3), ("epoch", 1), ("manual", 0)])
def test_all_schedulers_of_a_list_are_stepped(freq: str, steps: int, count: int) -> None:
    with inline(Listed, scheduler_step_freq=freq, config={"count": count}) as trainer:
        trainer.train()
        assert [each.last_epoch for each in operator_of(trainer).scheduler] == [steps] * count


class Failing(Listed):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["batch_idx"] == batch_info.get("fails"):
            raise ZeroDivisionError
        return super().train_batch(batch, batch_info)


def test_an_epoch_that_ends_in_a_call_which_an_error_ends_is_one_step() -> None:
    """The next call makes that step before its own."""
    with inline(Failing, scheduler_step_freq="epoch", config={"count": 1}) as trainer:
        (scheduler,) = operator_of(trainer).scheduler
        for fails, steps in (
            (4, 0),
            (2, 1),
        ):  # in the second epoch, which ends with the last batch before the second error
            with pytest.raises(ZeroDivisionError):
                trainer.train(num_steps=5, info={"fails": fails})
            assert scheduler.last_epoch == steps
        trainer.train(num_steps=2)
        assert scheduler.last_epoch == 2
        trainer.train(num_steps=1)
        assert scheduler.last_epoch == 3


def test_only_the_scheduler_that_the_operator_names_is_stepped() -> None:
    class Named(Listed):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup({"count": 2})
            self.both = self.scheduler
            self.scheduler = self.both[1]  # type: ignore[index]

    with inline(Named, scheduler_step_freq="batch") as trainer:
        trainer.train()
        assert [each.last_epoch for each in operator_of(trainer).both] == [0, 3]


class Stepping(Planned):
    """Steps its scheduler at the end of its own epochs."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.scheduler.step()  # type: ignore[union-attr]
        return result


def test_a_train_epoch_may_step_a_scheduler() -> None:
    for freq in ("batch", "epoch", "manual"):
        trained(torch_rank(Stepping, {"steps": 20}, scheduler_step_freq=freq), range(EPOCHS))


def test_a_scheduler_stays_as_the_user_made_it() -> None:
    replica = trained(replica_of(2, 1), range(1))
    scheduler = replica.operator.scheduler
    assert type(scheduler) is OneCycleLR
    assert vars(scheduler).keys() == vars(one_cycle(replica.operator.optimizer, 9)).keys()


def test_one_worker_gets_the_users_error() -> None:
    with inline(Planned, scheduler_step_freq="batch") as trainer, pytest.raises(ValueError, match="Tried to step"):
        trainer.fit(EPOCHS + 1, 0)


def polynomial(optimizer: Any, steps: int) -> Any:
    return PolynomialLR(optimizer, total_iters=steps)


def linear(optimizer: Any, steps: int) -> Any:
    return LinearLR(optimizer, total_iters=steps)


BEFORE = "training ends before the schedule, with another learning rate than its last one. Make it for"
# A case: how it is made; whose frequency; its own number of steps; those of the loop over two epochs; what the warning says.
OTHER_LENGTHS: dict[str, Any] = {
    "planned for fewer epochs": ({"kind": cosine, "epochs": 1}, "batch", 4, 8, "its learning rate rises again then"),
    "planned for more epochs": ({"kind": cosine, "epochs": 4}, "batch", 16, 8, BEFORE),
    "counted by the loader": (
        {"kind": cosine, "steps": 14},
        "batch",
        14,
        8,
        "; len(loader) in setup has the batches of all",
    ),
    "in sequence": ({"kind": in_sequence, "steps": 7}, "batch", 7, 8, "it raises an error then"),
    "polynomial": ({"kind": polynomial, "steps": 7}, "batch", 7, 8, "its learning rate is 0 then"),
    "linear": ({"kind": linear, "steps": 9}, "batch", 9, 8, BEFORE),
    "a function": (
        {"kind": lambda *given: LambdaLR(given[0], lambda step: 1.0), "epochs": 1},
        "batch",
        4,
        8,
        "its function",
    ),
    "epochs": ({"kind": cosine, "steps": 8}, "epoch", 8, 2, BEFORE),
    "stepped by hand": ({"kind": cosine, "epochs": 1}, "manual", 4, 8, "its learning rate rises again then"),
}


@pytest.mark.parametrize("case", [pytest.param(each, id=name) for name, each in OTHER_LENGTHS.items()])
def test_a_schedule_of_another_length_than_the_loop_is_one_warning(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    how, freq, length, steps, said = case
    rank = replica_of(2, 2, freq=freq, **how)
    rank.train(0, epochs=EPOCHS)
    (warning,) = caplog.messages
    assert f"LR ends with its step {length}, and makes {steps} until the end of this loop over 2 epochs: " in warning
    assert said in warning and ("with self.total_steps(epochs=2)" in warning) == (freq != "epoch")
    if freq != "manual" and length > steps:
        rank.train(1, epochs=EPOCHS)
        assert len(caplog.messages) == 1


FITTING: list[tuple[dict[str, Any], str]] = [
    *(({"kind": kind}, "batch") for kind in (one_cycle, cosine, in_sequence, polynomial, linear, from_a_table)),
    ({"kind": linear, "steps": 3}, "batch"),  # a warm-up
    ({"kind": cosine, "steps": 2}, "epoch"),
    ({"kind": cosine, "steps": 3}, "manual"),  # when it steps is not known
    ({"kind": users_own, "epochs": 1}, "batch"),
]


@pytest.mark.parametrize(("how", "freq"), FITTING)
def test_a_schedule_of_the_loops_length_is_none(how: Any, freq: str, caplog: pytest.LogCaptureFixture) -> None:
    rank = replica_of(2, 2, freq=freq, **how)
    for call in range(EPOCHS):
        rank.train(call, epochs=EPOCHS)
    assert not caplog.messages


def test_a_schedule_that_ends_in_a_call_is_a_warning_at_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    rank = trained(replica_of(2, 2, kind=cosine), range(EPOCHS))
    assert not caplog.messages
    trained(rank, range(EPOCHS, EPOCHS + 1))
    assert "ends with its step 8, and makes 12 until the end of this call of train(): its" in caplog.messages[0]
    trained(rank, range(EPOCHS + 1, EPOCHS + 2))
    assert len(caplog.messages) == 1


def test_calls_with_a_number_of_steps_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    rank = replica_of(2, 2, kind=cosine, steps=6)
    for call in range(2):
        rank.train(call, 3, epochs=2)
    assert not caplog.messages
    rank.train(2, 3, epochs=1)
    assert (
        "ends with its step 6, and makes 9 until the end of this call of train() with num_steps=3" in caplog.messages[0]
    )


@pytest.mark.parametrize(("num_steps", "made"), [(2, 4), (4, 8), (9, 8)])
@pytest.mark.parametrize("planned", [4, 8])
def test_a_call_with_a_number_of_steps_may_be_no_epoch(planned: int, num_steps: int, made: int, caplog: Any) -> None:
    """A schedule that steps after each epoch of the data makes fewer steps than the loop has calls."""
    rank = replica_of(2, 2, freq="epoch", kind=cosine, steps=planned)
    for call in range(8):
        rank.train(call, num_steps, epochs=8)
    assert rank.operator.scheduler.last_epoch == made
    said = f"its step {planned}, and makes {made} until the end of this loop over 8 epochs with num_steps={num_steps}: "
    assert [said in each for each in caplog.messages] == [True] * (made != planned)


def test_a_takeover_names_other_settings_and_a_replacement_none(caplog: pytest.LogCaptureFixture) -> None:
    first = trained(replica_of(1, 1, kind=cosine), range(1))
    replacement = replica_of(
        1, 1, kind=cosine, lr=0.2
    )  # with the same code, but not the same random numbers, for example
    replacement.load(first.state())
    replacement.rejoin()
    assert not caplog.messages
    second = replacement.taken_over(lambda: replica_of(1, 1, kind=cosine, lr=0.3))
    assert "lr of optimizers[0] (SGD) is 0.1 (here: 0.3)" in caplog.messages[0]
    assert second.progress.step == first.progress.step

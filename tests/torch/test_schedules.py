"""Schedules that have too few steps, which is said before they end, and who steps them."""

from contextlib import nullcontext
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

from raysgd import ConfigError, ElasticConfig
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


@pytest.mark.parametrize(
    ("kind", "end"), [(cosine, "its learning rate rises again then"), (one_cycle, "it raises an error then")]
)
def test_a_schedule_ends_too_early_if_fewer_workers_train(
    kind: Any, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Per worker, they make more steps: 7 in each epoch, in place of 4."""
    rank = trained(replica_of(2, 1, kind=kind), range(1))
    assert rank.progress.step == 7 and not caplog.messages
    with pytest.raises(ValueError, match="Tried to step") if kind is one_cycle else nullcontext():
        rank.train(1)
    (warning,) = caplog.messages
    assert f"ends with its step 8, and makes 14 until the end of this call of train(): {end}" in warning
    assert "fewer workers than num_workers make more steps, as batch_mode is 'per_worker'" in warning


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

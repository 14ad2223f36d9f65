"""A script that is killed and started again makes each call of a body once, and stops where it would have stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import RaysgdError, TorchTrainer
from raysgd.callbacks import Callback, EarlyStopping
from raysgd.callbacks.base import Run
from raysgd.engine.call import Call, Job
from raysgd.errors import ResourceError
from raysgd.replica.replica_base import ReplicaBase
from raysgd.trainer.call_runner import CallRunner
from raysgd.trainer.script_place import Made, ScriptPlace, storable
from tests.torch.small import inline, weights
from tests.training.test_auto_checkpoint import STEPS, Noisy, lived_until, started

EPOCHS = 4


class Plateau(Noisy):
    """The rate is halved by each update that is not better than the one before."""

    def setup(self, config: dict[str, Any]) -> None:
        def plateau(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

        super().setup({**config, "scheduler": plateau})


def halve(operator: Any) -> float:
    operator.optimizer.param_groups[0]["lr"] *= 0.5
    return float(operator.optimizer.param_groups[0]["lr"])


def changing(trainer: TorchTrainer) -> list[Any]:
    """Make changes and validations before training in each body."""
    rates = []
    for _ in trainer.epochs(EPOCHS):
        rates += trainer.apply_all_operators(halve)
        trainer.update_scheduler(1.0)
        rates.append(trainer.validate()["val_loss"])
        trainer.train()
    return rates


def state(trainer: TorchTrainer) -> list[Any]:
    rate = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    kinds = [(row["kind"], row["epoch"], row["step"], row.get("val_loss")) for row in trainer.history]
    return [weights(trainer).tolist(), rate, kinds]


@pytest.mark.parametrize("die_at", [2, 4, 8, 13])
@pytest.mark.parametrize("every", [1, 3, "epoch"])
def test_calls_before_training_are_made_once(tmp_path: Path, die_at: int, every: Any) -> None:
    common: dict[str, Any] = {"operator": Plateau, "scheduler_step_freq": "manual"}
    with inline(Plateau, scheduler_step_freq="manual", seed=3) as trainer:
        measured = changing(trainer)
        expected = state(trainer)
    lived_until(tmp_path, changing, {"die_at": die_at}, every=every, **common)
    with started(tmp_path, every=every, **common) as trainer:
        found = changing(trainer)
        assert state(trainer) == expected and found == measured[len(measured) - len(found) :]


def test_a_call_whose_values_json_lacks_is_not_made_again_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(trainer: TorchTrainer) -> list[Any]:
        return [
            (trainer.apply_all_operators(lambda operator: torch.tensor(halve(operator))), trainer.train())[0]
            for _ in trainer.epochs(1)
        ]

    lived_until(tmp_path, script, {"die_at": 3}, every=2)
    with started(tmp_path, every=2) as trainer:
        assert script(trainer) == [[None]] and "its values are not known. It returns None" in caplog.text
        assert trainer.apply_all_operators(halve) == [pytest.approx(0.02 / 4 * 0.7)]


def shake(operator: Any) -> None:
    with torch.no_grad():
        operator.model[0].weight += torch.rand(()) / 10


def shaking(trainer: TorchTrainer) -> None:
    for _ in trainer.epochs(EPOCHS):
        trainer.train()
        trainer.apply_all_operators(shake)


@pytest.mark.parametrize("every", [2, "epoch"])
def test_changes_draw_the_numbers_of_an_undisturbed_run(tmp_path: Path, every: Any) -> None:
    with inline(Noisy, scheduler_step_freq="epoch", seed=3) as trainer:
        shaking(trainer)
        expected = weights(trainer).tolist()
    for die_at in (2 * STEPS + 3, 3 * STEPS + 1):
        lived_until(tmp_path, shaking, {"die_at": die_at}, every=every)
    with started(tmp_path, every=every) as trainer:
        shaking(trainer)
        assert weights(trainer).tolist() == expected


class Scores(Noisy):
    """Its validations measure `score`, which is best at first."""

    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        return {**super().validate(val_iterator, info), "score": float(self.global_step)}


def validating_first(trainer: TorchTrainer) -> int:
    for _ in trainer.epochs(9):
        trainer.validate()
        trainer.train()
    return trainer.history[-1]["step"]


class Enough(Callback):
    """Wants to stop at a validation. It does not see earlier rows."""

    def on_result(self, result: Any) -> None:
        self.wants_stop = self.wants_stop or (result.kind == "validate" and result.step == 2 * STEPS)


@pytest.mark.parametrize("callback", [lambda: EarlyStopping("score", patience=2), Enough])
@pytest.mark.parametrize("die_at", [7, 11, 13])
def test_a_body_in_which_a_callback_has_asked_to_stop_is_finished(
    tmp_path: Path, callback: Callable[[], Callback], die_at: int
) -> None:
    lived_until(tmp_path, validating_first, {"die_at": die_at}, every=2, operator=Scores, callbacks=[callback()])
    with started(tmp_path, every=2, operator=Scores, callbacks=[callback()]) as trainer:
        assert validating_first(trainer) == 3 * STEPS
    with started(tmp_path, every=2, operator=Scores, callbacks=[callback()]) as trainer:
        assert validating_first(trainer) == 3 * STEPS, "nothing is left to do"


@pytest.mark.parametrize("every", [2, "epoch"])
def test_a_stop_ends_one_loop_also_after_a_restart(tmp_path: Path, every: Any) -> None:
    def script(trainer: TorchTrainer) -> int:
        trainer.fit(50)
        trainer.fit(6, validate_every=0)
        return trainer.history[-1]["step"]

    common: dict[str, Any] = {"every": every, "operator": Scores}
    lived_until(tmp_path, script, {"die_at": 4 * STEPS + 3}, callbacks=[EarlyStopping("score", patience=1)], **common)
    with started(tmp_path, callbacks=[EarlyStopping("score", patience=1)], **common) as trainer:
        assert script(trainer) == 8 * STEPS


def test_a_change_between_two_loops_is_made_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(trainer: TorchTrainer) -> None:
        trainer.apply_all_operators(halve)
        trainer.fit(1, validate_every=0)
        trainer.apply_all_operators(halve)
        trainer.fit(2, validate_every=0)

    lived_until(tmp_path, script, {"die_at": 2 * STEPS + 1})
    assert not [each for each in caplog.messages if "runs the code between loops again" in each]
    with started(tmp_path) as trainer:
        script(trainer)
    (line,) = [each for each in caplog.messages if "runs the code between loops again" in each]
    assert line.startswith("apply_all_operators(halve) is called after loop 1") and "was in loop 2" in line


def test_more_patience_continues_a_loop_that_had_ended(tmp_path: Path) -> None:
    with started(tmp_path, operator=Scores, callbacks=[EarlyStopping("score", patience=1)]) as trainer:
        trainer.fit(6)
    with started(tmp_path, operator=Scores, callbacks=[EarlyStopping("score", patience=3)]) as trainer:
        assert trainer.fit(6)[-1]["step"] == 4 * STEPS


def test_a_change_of_which_only_the_workers_know_is_not_made_again() -> None:
    """The script had ended before it could note it."""
    place = ScriptPlace()
    place.resume(1, 2, [Made("train()", {}, []), Made("", None)])
    assert place.begin_body(1, 2) == 1 and place.find_recorded("train()") is not None
    assert place.find_recorded("update_scheduler()", change=True) == Made("", None)
    assert place.begin_body(1, 3) == 0 and place.find_recorded("train()") is None


def test_it_is_no_measuring_call() -> None:
    place = ScriptPlace()
    place.resume(1, 2, [Made("", None)])
    assert place.begin_body(1, 2) == 0 and place.find_recorded("train()") is None
    assert place.find_recorded("update_scheduler()", change=True) is None


@pytest.mark.parametrize("values", [[1.5, None], [], [{"a": [1]}]])
def test_values_that_json_holds_are_stored(values: list[Any]) -> None:
    assert storable(values) == values


@pytest.mark.parametrize("values", [[torch.ones(1)], [(1, 2)], [{1: 2}], [float("nan")]])
def test_other_values_are_not(values: list[Any]) -> None:
    assert storable(values) is None


class Mine(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_a_call_that_raised_an_error_raises_one_like_it() -> None:
    class Local(Exception):
        pass

    place = ScriptPlace()
    raised = [(Mine(1, 2), Mine, "^1 and 2$"), (OSError("x"), OSError, "^x$"), (Local("y"), RaysgdError, "Local: y$")]
    for error in (
        *(each for each, *_ in raised),
        ResourceError("z"),
        KeyboardInterrupt(),
    ):  # the last two may not come again
        place.note_error("train()", error)
    again = ScriptPlace()
    again.resume(1, 2, json.loads(json.dumps(place.as_json())))
    assert again.begin_body(1, 2) == 0
    for _, kind, text in raised:
        with pytest.raises(kind, match=text) as found:
            again.find_recorded("train()")
        assert type(found.value) is kind
    assert again.made == place.made and len(place.made) == len(raised)


@pytest.mark.parametrize("stop", [False, True])
def test_a_call_that_is_not_made_again_ends_a_fit_as_it_did(stop: bool) -> None:
    """As `EarlyStopping` of Keras does."""
    before = ScriptPlace()
    before.note(Made("train()", {"loss": 1.0}, [{"loss": 1.0}], stop))
    runner = CallRunner([], Run(trainer="TFTrainer", name="digits", num_workers=2))
    runner.place.resume(1, 0, json.loads(json.dumps(before.as_json())))
    runner.place.begin_body(1, 0)
    no_engine: Any = None
    assert runner.measure(no_engine, "train", Job(Call(ReplicaBase.train, {}))) == ({"loss": 1.0}, [{"loss": 1.0}])
    assert runner.stop == stop

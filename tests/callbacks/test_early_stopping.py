"""EarlyStopping ends the loop over epochs, also of a script that was killed meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from raysgd import AutoCheckpoint, ConfigError, TorchTrainer
from raysgd.callbacks import CallResult, EarlyStopping
from tests.callbacks.recording import Line

VALUES = [3.0, 1.0, float("nan"), 1.0, 0.95, 0.2, 0.1]


class Scored(Line):
    """Measures VALUES, one in each validation."""

    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        return {**super().validate(val_iterator, info), "score": VALUES[self.global_step // 4 - 1]}


def epochs_until_stop(callback: EarlyStopping, **arguments: Any) -> int:
    with TorchTrainer(training_operator_cls=Scored, use_gpu=False, callbacks=[callback], **arguments) as trainer:
        return len(trainer.fit(len(VALUES)).of("train"))


@pytest.mark.parametrize(
    ("settings", "stops_after"),
    [({"patience": 1}, 3), ({"patience": 2}, 4), ({"patience": 3}, 7), ({"patience": 3, "min_delta": 0.1}, 5)],
)
def test_it_stops_after_as_many_results_without_improvement(settings: dict[str, Any], stops_after: int) -> None:
    callback = EarlyStopping("score", **settings)
    assert epochs_until_stop(callback) == stops_after
    assert callback.best == min(value for value in VALUES[: 2 if stops_after < 7 else 7] if value == value)


def test_a_larger_value_can_be_better() -> None:
    assert epochs_until_stop(EarlyStopping("score", patience=2, mode="max")) == 3


def test_it_continues_to_count_after_a_restart(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"checkpoints": AutoCheckpoint(path=tmp_path), "resume": "auto"}
    with TorchTrainer(
        training_operator_cls=Scored, use_gpu=False, callbacks=[EarlyStopping("score", patience=2)], **arguments
    ) as trainer:
        for epoch in trainer.epochs(7):
            trainer.train()
            trainer.validate()
            if epoch == 4:
                break  # the checkpoint is that of epoch 3
    for _ in range(2):  # the second one finds a loop that was ended
        assert epochs_until_stop(EarlyStopping("score", patience=2), **arguments) == 4


def test_another_trainer_begins_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    callback = EarlyStopping("score", patience=2)
    assert epochs_until_stop(callback) == 4
    monkeypatch.setitem(globals(), "VALUES", [9.0, 8.0, 7.0, 7.0])
    assert epochs_until_stop(callback) == 4
    assert callback.best == 7
    with TorchTrainer(training_operator_cls=Scored, use_gpu=False, callbacks=[callback]) as trainer:
        trainer.train()
    assert callback.best is None
    assert caplog.messages[-1] == "EarlyStopping('score') had no effect, because no result had this metric"


@pytest.mark.parametrize(
    ("metric", "mode", "warns"),
    [("val_accuracy", "min", True), ("val_loss", "min", False), ("val_accuracy", "max", False), ("mAP", "min", True)],
)
def test_the_lowest_accuracy_is_most_likely_not_meant(
    metric: str, mode: Any, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    EarlyStopping(metric, mode=mode)
    AutoCheckpoint(path=tmp_path, best=metric, mode=mode)
    expected = [f"EarlyStopping({metric!r}) waits for", f"AutoCheckpoint(best={metric!r}) keeps the checkpoint with"]
    advice = " the lowest value: pass mode='max' for the highest"
    assert caplog.messages == ([text + advice for text in expected] if warns else [])


def test_mistakes_are_refused() -> None:
    for wrong, message in [
        ({"metric": 3}, "metric must be the name of a metric"),
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"mode": "low"}, "mode must be 'min' or 'max', got 'low'"),
        ({"min_delta": -1}, "min_delta must be a number of at least 0, got -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EarlyStopping(**{"metric": "val_loss", **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"EarlyStopping\('val_los'\) was not measured: .*val_loss"):
        epochs_until_stop(EarlyStopping("val_los"))
    report = CallResult(kind="report", epoch=1, step=1, metrics={}, by_worker=[], world_size=1, seconds=0.0)
    with pytest.raises(ConfigError, match="a training function ends its own loop"):
        EarlyStopping("val_loss").on_result(report)


def test_the_log_says_why_the_loop_ended(caplog: pytest.LogCaptureFixture) -> None:
    epochs_until_stop(EarlyStopping("score", patience=2))
    assert (
        "EarlyStopping ends the loop over epochs: score has not improved for 2 results (mode='min', best value 1)"
        in caplog.messages
    )
    epochs_until_stop(EarlyStopping("score", patience=1, min_delta=3))
    assert "score has not improved by more than 3 for 1 result (mode='min', best value 3)" in caplog.text
    caplog.clear()
    epochs_until_stop(EarlyStopping("unknown"))
    assert caplog.messages == ["EarlyStopping('unknown') had no effect, because no result had this metric"]

"""Which calls a callback of a class trainer gets, in which order, and what its own errors do."""

import logging
from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer
from raysgd.callbacks import Callback, CallResult
from tests.callbacks.recording import Broken, Demanding, Heard, Line, called_by_a_trainer


def trainer(*callbacks: Callback, **more: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=callbacks, **more)


def test_the_order_of_calls_and_their_arguments(tmp_path: Path) -> None:
    heard = Heard()
    with trainer(heard, logdir=tmp_path / "logs", config={"rows": 32}) as made:
        first, checked = made.train(), made.validate()
        made.train(num_steps=2)
        assert made.logdir == tmp_path / "logs"
    assert heard.order == ["start", "result", "result", "result", "end"]
    (run,) = heard.named("start")
    assert (run.trainer, run.name, run.num_workers, run.config) == ("TorchTrainer", "Line", 1, {"rows": 32})
    assert run.folder == tmp_path / "logs"
    assert not run.folder.exists(), "callbacks create it when they write to it"
    results = heard.named("result")
    assert [(each.kind, each.epoch, each.step, each.world_size) for each in results] == [
        ("train", 1, 4, 1),
        ("validate", 1, 4, 1),
        ("train", 2, 6, 1),
    ]
    assert results[0].metrics == first
    assert results[1].metrics == checked
    assert all(each.by_worker == [each.metrics] and each.seconds > 0 and each.traces == [{}] for each in results)
    assert heard.named("end") == [False]


def test_progress_announces_a_call_and_counts_its_batches() -> None:
    heard = Heard()
    with trainer(heard) as made:
        made.train()
    results = heard.named("progress")
    assert results[0].worker == ""
    assert {each.kind for each in results} == {"train"}
    assert results[-1].progress.batches == results[-1].progress.expected == 4
    assert results[-1].metrics["num_samples"] == 32


def test_a_users_error_is_reported_and_the_trainer_stays_usable() -> None:
    heard = Heard()
    with trainer(heard) as made:
        with pytest.raises(ZeroDivisionError):
            made.train(info={"fail": True})
        made.train()
    assert heard.order == ["start", "error", "result", "end"]
    assert isinstance(heard.named("error")[0], ZeroDivisionError)
    assert heard.named("end") == [False], "the next call succeeded"


def test_the_end_says_whether_the_block_failed() -> None:
    heard = Heard()
    with pytest.raises(KeyError), trainer(heard) as made:
        made.train()
        raise KeyError("raised by the script")
    assert heard.named("end") == [True]


def test_a_set_up_that_fails_is_reported() -> None:
    class NoSetup(Line):
        def setup(self, config: dict[str, Any]) -> None:
            raise ArithmeticError("planned")

    heard = Heard()
    with pytest.raises(ArithmeticError):
        TorchTrainer(training_operator_cls=NoSetup, use_gpu=False, callbacks=[heard])
    assert heard.order == ["start", "error", "end"]
    assert heard.named("end") == [True]


def test_an_error_in_a_callback_is_logged_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    with caplog.at_level(logging.ERROR, logger="raysgd"), trainer(Broken(), heard) as made:
        results = [made.train()["train_loss"] for _ in range(2)]
    with trainer() as made:
        assert [made.train()["train_loss"] for _ in range(2)] == results
    assert heard.order == ["start", "result", "result", "end"], "callbacks after the broken one get all calls"
    logged = [record for record in caplog.records if "Broken.on_result" in record.getMessage()]
    assert "training continues" in logged[0].getMessage()
    assert logged[0].exc_info is not None
    assert isinstance(logged[0].exc_info[1], LookupError)
    assert [record.getMessage() for record in logged[1:]] == [
        "Broken.on_result raised 2 errors; the first one was logged above"
    ]


class StopsAtOnce(Callback):
    """Stops training after each result."""

    stops_training = True

    def on_result(self, result: CallResult) -> None:
        raise TimeoutError(f"enough after step {result.step}")


def test_a_callback_with_stops_training_ends_the_call() -> None:
    heard = Heard()
    with trainer(StopsAtOnce(), heard) as made:
        with pytest.raises(TimeoutError, match="enough after step 4"):
            made.train()
        with pytest.raises(TimeoutError, match="enough after step 8"):
            made.train()
    assert heard.order == ["start", "result", "error", "result", "error", "end"]
    assert len(made.history) == 2, "the results are kept"


def test_a_callback_that_fails_at_the_start_leaves_nothing_behind() -> None:
    with pytest.raises(LookupError, match="broken on purpose"):
        trainer(Demanding())


def test_repr_of_a_trainer() -> None:
    with trainer() as made:
        assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 0, idle)"
        made.train()
        assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 1, idle)"
    assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 1, shut down)"


class Asking(Callback):
    """Reads its trainer's repr while a call runs."""

    trainer: Any = None
    seen = ""

    def on_progress(self, now: Any) -> None:
        self.seen = repr(self.trainer)


def test_repr_during_a_call() -> None:
    asking = Asking()
    with trainer(asking) as made:
        asking.trainer = made
        made.train()
        assert asking.seen == "TorchTrainer(Line, 1 worker, epoch 1, training)"
        made.validate()
        assert asking.seen.endswith("validating)")


class Late(Callback):
    """Raises errors when there is no call left to stop."""

    stops_training = True

    def on_error(self, error: BaseException) -> None:
        raise LookupError("late")

    def on_end(self, failed: bool) -> None:
        raise LookupError("later still")


def test_a_stop_that_is_too_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = called_by_a_trainer(Late(), Demanding())
    with caplog.at_level(logging.ERROR, logger="raysgd"):
        callbacks.error(ValueError("the call's own"))
        callbacks.raise_stop()
        callbacks.end(failed=True)
        callbacks.raise_stop()
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors.count("late") == errors.count("later still") == 1
    assert errors.count("broken on purpose") == 2, "errors of the second callback are logged, too"

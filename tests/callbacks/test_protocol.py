"""What a callback hears on the class face, in which order, and what its own errors do."""

import logging
from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer
from raysgd.callbacks import Callback, Result
from raysgd.callbacks.callback_list import CallbackList
from tests.callbacks.listening import Broken, Demanding, Heard, Line


def trainer(*callbacks: Callback, **more: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=callbacks, **more)


def test_the_order_and_what_is_told(tmp_path: Path) -> None:
    heard = Heard()
    with trainer(heard, logdir=tmp_path / "logs", config={"rows": 32}) as made:
        first, checked = made.train(), made.validate()
        made.train(num_steps=2)
        assert made.logdir == tmp_path / "logs"
    assert heard.order == ["start", "result", "result", "result", "end"]
    (run,) = heard.named("start")
    assert (run.trainer, run.name, run.num_workers, run.config) == ("TorchTrainer", "Line", 1, {"rows": 32})
    assert run.folder == tmp_path / "logs"
    assert not run.folder.exists(), "made by who writes into it"
    told = heard.named("result")
    assert [(each.kind, each.epoch, each.step, each.world_size) for each in told] == [
        ("train", 1, 4, 1),
        ("validate", 1, 4, 1),
        ("train", 2, 6, 1),
    ]
    assert told[0].metrics == first
    assert told[1].metrics == checked
    assert all(each.by_worker == [each.metrics] and each.seconds > 0 and each.traces == [{}] for each in told)
    assert heard.named("end") == [False]


def test_progress_says_when_a_call_begins_and_how_far_it_is() -> None:
    heard = Heard()
    with trainer(heard) as made:
        made.train()
    told = heard.named("progress")
    assert told[0].worker == ""
    assert {each.kind for each in told} == {"train"}
    assert told[-1].progress.batches == told[-1].progress.expected == 4
    assert told[-1].metrics["num_samples"] == 32


def test_an_error_of_the_users_is_told_and_the_trainer_stays_usable() -> None:
    heard = Heard()
    with trainer(heard) as made:
        with pytest.raises(ZeroDivisionError):
            made.train(info={"fail": True})
        made.train()
    assert heard.order == ["start", "error", "result", "end"]
    assert isinstance(heard.named("error")[0], ZeroDivisionError)
    assert heard.named("end") == [False], "what came after it went well"


def test_the_end_says_how_the_block_was_left() -> None:
    heard = Heard()
    with pytest.raises(KeyError), trainer(heard) as made:
        made.train()
        raise KeyError("of the script's own")
    assert heard.named("end") == [True]


def test_a_set_up_that_fails_is_told() -> None:
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
    assert heard.order == ["start", "result", "result", "end"], "those behind the broken one hear everything"
    logged = [record for record in caplog.records if "Broken.on_result" in record.getMessage()]
    assert "training continues" in logged[0].getMessage()
    assert logged[0].exc_info is not None
    assert isinstance(logged[0].exc_info[1], LookupError)
    assert [record.getMessage() for record in logged[1:]] == [
        "Broken.on_result raised 2 errors; the first one was logged above"
    ]


class Never(Callback):
    """Wants nobody to get further than one result."""

    stops_training = True

    def on_result(self, result: Result) -> None:
        raise TimeoutError(f"enough after step {result.step}")


def test_a_callback_that_asks_for_it_stops_training() -> None:
    heard = Heard()
    with trainer(Never(), heard) as made:
        with pytest.raises(TimeoutError, match="enough after step 4"):
            made.train()
        with pytest.raises(TimeoutError, match="enough after step 8"):
            made.train()
    assert heard.order == ["start", "result", "error", "result", "error", "end"]
    assert len(made.history) == 2, "what was measured is there"


def test_one_that_fails_at_the_start_leaves_nothing_behind() -> None:
    with pytest.raises(LookupError, match="broken on purpose"):
        trainer(Demanding())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Heard(), "must be a list of"),
        (5, "must be a list of"),
        ([Heard], "got the class Heard: pass Heard()"),
        (["print"], "got 'print'"),
    ],
)
def test_wrong_callbacks(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=given)


def test_print_says_what_the_trainer_is() -> None:
    with trainer() as made:
        assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 0, idle)"
        made.train()
        assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 1, idle)"
    assert repr(made) == "TorchTrainer(Line, 1 worker, epoch 1, shut down)"


class Asking(Callback):
    """Looks at its trainer while a call runs."""

    trainer: Any = None
    seen = ""

    def on_progress(self, now: Any) -> None:
        self.seen = repr(self.trainer)


def test_print_while_it_trains() -> None:
    asking = Asking()
    with trainer(asking) as made:
        asking.trainer = made
        made.train()
        assert asking.seen == "TorchTrainer(Line, 1 worker, epoch 1, training)"
        made.validate()
        assert asking.seen.endswith("validating)")


class Late(Callback):
    """Wants to stop where there is nothing left to be stopped."""

    stops_training = True

    def on_error(self, error: BaseException) -> None:
        raise LookupError("late")

    def on_end(self, failed: bool) -> None:
        raise LookupError("later still")


def test_a_stop_that_comes_too_late_is_logged_and_not_raised_in_another_call(caplog: pytest.LogCaptureFixture) -> None:
    told = CallbackList([Late(), Demanding()])
    with caplog.at_level(logging.ERROR, logger="raysgd"):
        told.error(ValueError("the call's own"))
        told.raise_stop()
        told.end(failed=True)
        told.raise_stop()
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors.count("late") == errors.count("later still") == 1
    assert errors.count("broken on purpose") == 2, "the second one's are not forgotten"

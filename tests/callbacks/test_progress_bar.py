"""The progress bar shows the user's metrics and missing workers; failed callbacks are visible in results."""

import io
import sys
import traceback
from typing import Any

import pytest

from raysgd import Recovery, Speed
from raysgd.callbacks import Callback, CallResult, History, ProgressBar, Run
from tests.callbacks.recording import called_by_a_trainer, underway
from tests.torch.small import Line, inline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {"epoch": 3, "batch_count": 2, "num_samples": 8, "accuracy": 0.75, "f1": 0.5, "last_f1": 0.25, "note": "x"}


def shown(stream: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the bar of a run with 4 workers wanted writes for one call."""
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar()
    bar.on_start(Run(trainer="T", name="N", num_workers=4))
    bar.on_progress(underway(phase="train"))
    bar.on_recovery(Recovery("worker death", (3,), 4, 3, True, 0, 0.1))
    bar.on_progress(underway("a", METRICS, phase="train", epoch=3, batches=1, expected=2))
    bar.on_result(CallResult(kind="train", epoch=3, step=2, metrics=METRICS, by_worker=[], world_size=3, seconds=1.0))
    return str(stream.getvalue())


def test_a_terminal_shows_the_users_metrics_and_missing_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    for part in ("accuracy=0.75", "f1=0.5", "epoch=3", "workers=3/4", "2/2"):
        assert part in text, text
    assert text.rindex("f1=0.5") > text.rfind("f1=0.25"), "the end shows the means, not the last batch"
    assert "batch_count" not in text


def test_the_last_line_names_a_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    bar = ProgressBar()
    bar.on_start(Run(trainer="T", name="N", num_workers=4, speed=lambda: Speed(slow=(1,), phase="data")))
    bar.on_progress(underway(phase="train"))
    assert "slow" not in stream.getvalue()
    bar.on_result(CallResult(kind="train", epoch=3, step=2, metrics=METRICS, by_worker=[], world_size=3, seconds=1.0))
    assert "slow=rank 1 (data)" in stream.getvalue()


def test_one_worker_needs_no_mention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with inline(use_tqdm=True) as trainer:
        trainer.train()
    assert "3/3" in terminal.getvalue()
    assert "workers" not in terminal.getvalue()


def test_the_bar_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = ProgressBar()
    bar.on_start(Run(trainer="T", name="N", num_workers=4))
    bar.on_wait("nothing, because no call runs")
    bar.on_progress(underway(phase="train"))
    now = underway("a", METRICS, epoch=3, batches=1, expected=2)
    bar.on_progress(now)
    bar.on_wait("2 more workers, which need 2 CPU (1 free)")
    waiting = terminal.getvalue()
    assert "waiting for=2 more workers, which need 2 CPU (1 free), epoch=3, " in waiting
    assert "f1=0.25" in waiting and "workers=4/4" in waiting
    bar.on_recovery(Recovery("worker death", (3,), 4, 3, True, 0, 0.1))
    bar.on_progress(now)
    bar.on_end(failed=False)
    assert "waiting" not in terminal.getvalue()[len(waiting) :]
    assert "workers=3/4" in terminal.getvalue()[len(waiting) :]
    assert "no call runs" not in terminal.getvalue()


def test_without_a_terminal_there_is_one_line_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(io.StringIO(), monkeypatch)
    (line,) = text.splitlines()
    assert line.startswith("train: 2 batches, epoch=3, accuracy=0.75, f1=0.5, samples/s=")
    assert "workers=3/4" in line
    assert "\r" not in text


class Fails(Callback):
    def on_result(self, result: CallResult) -> None:
        if result.kind == "train":
            raise OSError("the disk is full")


@pytest.mark.parametrize(("failing", "line"), [(0, "0 batches"), (1, "1 batch")])
def test_a_call_that_fails_says_so(failing: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["batch_idx"] == failing:
                raise KeyError("planned")
            return super().train_batch(batch, batch_info)

    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with inline(Failing, use_tqdm=True) as trainer, pytest.raises(KeyError):
        trainer.train()
    (written,) = stream.getvalue().splitlines()
    assert written.startswith(f"train: {line}, then KeyError") and not written.endswith(", ")


def test_a_failed_callback_is_visible_in_the_result_of_its_call(caplog: pytest.LogCaptureFixture) -> None:
    found = ["Fails.on_result: OSError: the disk is full"]
    with inline(Line, callbacks=[Fails()]) as trainer:
        assert trainer.train()["callback_errors"] == found
        assert "callback_errors" not in trainer.validate()
        assert trainer.train()["callback_errors"], "each call says it, although only the first error is logged"
        assert trainer.history.column("callback_errors") == [found, None, found]
    (first, _) = [record for record in caplog.records if "Fails.on_result" in record.getMessage()]
    assert first.exc_info is not None
    frames = [frame.name for frame in traceback.extract_tb(first.exc_info[2])]
    assert frames == ["on_result"], "the log shows the user's frames only"


class FailsAtTheEnd(Callback):
    def on_end(self, failed: bool) -> None:
        raise OSError("the disk is full")


def test_a_callback_that_fails_at_the_end_is_in_the_history() -> None:
    with inline(Line, callbacks=[FailsAtTheEnd()]) as trainer:
        trainer.train()
    assert trainer.history[-1]["callback_errors"] == ["FailsAtTheEnd.on_end: OSError: the disk is full"]


def test_reports_of_a_training_function_say_it_too() -> None:
    class FailsAlways(Callback):
        def on_result(self, result: CallResult) -> None:
            raise OSError("the disk is full")

    history = History()
    callbacks = called_by_a_trainer(history, FailsAlways())
    callbacks.result(
        CallResult(kind="report", epoch=1, step=1, metrics={"a": 1}, by_worker=[], world_size=1, seconds=1.0)
    )
    assert history[-1]["callback_errors"] == ["FailsAlways.on_result: OSError: the disk is full"]

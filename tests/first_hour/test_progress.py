"""The progress bar shows the user's metrics and missing workers; failed callbacks are visible in results."""

import io
import sys
from typing import Any

import pytest

from raysgd.callbacks import Callback
from raysgd.callbacks.base import CallResult, Run, Underway
from raysgd.callbacks.progress_bar import ProgressBar
from raysgd.core.policy import Recovery
from raysgd.core.progress import Progress
from tests.torch.small import Line, inline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {"epoch": 3, "batch_count": 2, "num_samples": 8, "accuracy": 0.75, "f1": 0.5, "last_f1": 0.25, "note": "x"}


def shown(stream: Any, monkeypatch: pytest.MonkeyPatch, *, present: int) -> str:
    """Return what the bar of a run with 4 workers wanted writes for one call."""
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar()
    bar.on_start(Run(trainer="T", name="N", num_workers=4))
    bar.on_progress(Underway(kind="train", worker="", progress=Progress(phase="train")))
    if present < 4:
        bar.on_recovery(Recovery("worker death", (3,), 4, present, True, 0, 0.1))
    now = Progress(phase="train", epoch=3, batches=1, expected=2)
    bar.on_progress(Underway(kind="train", worker="a", progress=now, metrics=METRICS))
    bar.on_result(
        CallResult(kind="train", epoch=3, step=2, metrics=METRICS, by_worker=[], world_size=present, seconds=1.0)
    )
    return str(stream.getvalue())


def test_a_terminal_shows_the_users_metrics_and_missing_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch, present=3)
    for part in ("accuracy=0.75", "f1=0.25", "epoch=3", "workers=3 of 4", "2/2"):
        assert part in text, text
    assert "batch_count" not in text


def test_all_workers_present_need_no_mention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "workers" not in shown(Terminal(), monkeypatch, present=4)


def test_without_a_terminal_there_is_one_line_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(io.StringIO(), monkeypatch, present=3)
    (line,) = text.splitlines()
    assert line.startswith("train: 2 batches, epoch=3, accuracy=0.75, f1=0.25")
    assert "workers=3 of 4" in line
    assert "\r" not in text


class Fails(Callback):
    def on_result(self, result: CallResult) -> None:
        if result.kind == "train":
            raise OSError("the disk is full")


def test_a_failed_callback_is_visible_in_the_result_of_its_call() -> None:
    with inline(Line, callbacks=[Fails()]) as trainer:
        assert trainer.train()["callback_errors"] == ["Fails.on_result: OSError: the disk is full"]
        assert "callback_errors" not in trainer.validate()
        assert trainer.train()["callback_errors"], "each call says it, although only the first error is logged"

"""A Lightning fit that is stopped continues with the next batch, with the same bits. One worker, in this process: a stop is an exception
here. tests/train/lightning/test_workers.py has several workers, which are killed."""

import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from raysgd.core.control import Control
from raysgd.core.ranks import RankInfo
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.elastic_state import Commit
from raysgd.train.sessions import Attempt, Codec, Session, Stopped, running
from tests.train.lightning.fits import assert_equal, fit

pytestmark = pytest.mark.usefixtures("group")


class Recording(Session):
    """The session of one attempt, which adds to the rounds of those before it."""

    def __init__(self, commit: Commit, rounds: list[Any], workers: int | None = None) -> None:
        attempt = Attempt(run=0, reports=len(rounds), workers=workers)
        super().__init__(RankInfo(), Control(), attempt, Codec(), commit=commit)
        self.rounds = rounds

    def _send(self, kind: Any, head: bytes, payload: bytes | None) -> None:
        self.rounds.append((pickle.loads(head), payload))


def attempts(config: dict[str, Any], *, at_stop: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run the function until it is no longer stopped. Count the attempts."""

    def stop(number: int) -> None:
        at_stop()
        raise Stopped(asked=False)

    commit, number, rounds = Commit(), 0, list[Any]()
    while True:
        number += 1
        try:
            with running(Recording(commit, rounds)):
                return {**fit({**config, "harm": stop}), "attempts": number, "rounds": rounds}
        except Stopped:
            continue


CASES = {
    "in forward": ((0, 5, "forward"), {}),
    "before the step": ((0, 5, "before"), {}),
    "after the step": ((0, 5, "after"), {}),
    "at an epoch's first batch": ((0, 12, "forward"), {}),
    "in validation": ((0, 12, "validation"), {}),
    "in a validation within an epoch": ((0, 6, "validation"), {"trainer": {"val_check_interval": 0.5}}),
    "after a validation within an epoch": ((0, 6, "forward"), {"trainer": {"val_check_interval": 0.5}}),
    "with fewer batches": ((0, 7, "forward"), {"trainer": {"limit_train_batches": 10}}),
    "with rare commits": ((0, 10, "after"), {"commit_every": 7}),
    "with early stopping": ((0, 18, "forward"), {"patience": 2, "trainer": {"max_epochs": 6}}),
    "in a save of the best model": ((0, 12, "save"), {"best": True, "trainer": {"max_epochs": 4}}),
    "after a save of the best model": ((0, 12, "reported"), {"best": True, "trainer": {"max_epochs": 4}}),
    "in bfloat16, clipped": (
        (0, 5, "before"),
        {"trainer": {"precision": "bf16-mixed", "gradient_clip_val": 0.1}},
    ),
    "between other calls": ((0, 5, "forward"), {"around": True}),
    "after the fit": ((0, 24, "after the fit"), {"around": True}),
    "with dropout": ((0, 5, "after"), {"dropout": 0.3}),
    "with an incomplete step": ((0, 11, "before"), {"size": 91}),
}
if hasattr(pl.callbacks, "EMAWeightAveraging"):  # since 2.6
    CASES["with averaged weights"] = ((0, 18, "forward"), {"averages": True})
    # The module has the averages then. So a commit is a copy: a reference would have them, too.
    CASES["in a validation of averaged weights"] = ((0, 12, "validation"), {"averages": True})


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_fit_has_the_bits_of_one_that_was_not(tmp_path: Path, case: str) -> None:
    fault, settings = CASES[case]
    folders = [tmp_path / "undisturbed", tmp_path / "found"]
    for folder in folders:
        folder.mkdir()
    undisturbed = attempts({**settings, "marks": str(folders[0])})
    found = attempts({**settings, "faults": [fault], "marks": str(folders[1])})
    assert found["attempts"] == 2
    assert_equal(found, undisturbed, within=0)
    assert (found["steps"] == 36) == (case == "with early stopping")


@pytest.mark.parametrize("place", ["reported", "validation"])
def test_each_epoch_is_reported_once(tmp_path: Path, place: str) -> None:
    found = attempts({"reports": True, "faults": [(0, 12, place)], "marks": str(tmp_path)})
    assert found["attempts"] == 2
    assert [(row["epoch"], row["step"]) for row, _ in found["rounds"]] == [(0, 12), (1, 24)]
    assert [row["val_loss"] for row, _ in found["rounds"]] == [loss for _, loss in found["validations"]]
    with Checkpoint.from_bytes(found["rounds"][1][1], trusted=True).as_directory() as folder:
        saved = torch.load(Path(folder, "checkpoint.ckpt"), weights_only=False)
    for name, value in found["weights"].items():
        assert torch.equal(saved["state_dict"][name], value)


def test_a_worker_is_missing_from_the_beginning() -> None:
    """Two workers would have two micro-batches of 4 samples each in a step."""
    with running(Recording(Commit(), [], workers=2)):
        found = fit({})
    assert [len(each) for each in found["samples"]] == [16] * 12
    assert sorted(each for step in found["samples"][:6] for each in step) == list(range(96))


def test_a_fit_of_a_checkpoints_file_continues(tmp_path: Path) -> None:
    """The path of a checkpoint that the function passes is for its first attempt."""
    rounds = attempts({"reports": True})["rounds"]
    with Checkpoint.from_bytes(rounds[0][1], trusted=True).as_directory() as folder:
        path = Path(folder, "checkpoint.ckpt")
        undisturbed = attempts({"ckpt_path": path})
        faults = {"faults": [(0, 18, "forward")], "marks": str(tmp_path)}
        found = attempts({"ckpt_path": path, **faults}, at_stop=path.unlink)
    assert found["attempts"] == 2 and undisturbed["steps"] == 24
    assert_equal(found, undisturbed, within=0)


def test_sigterm_stays_raysgds(tmp_path: Path) -> None:
    """In the sanity check before the training, in the training, and in a validation."""

    def on_notice(*_: Any) -> None:
        raise NotImplementedError

    before, found = signal.signal(signal.SIGTERM, on_notice), list[Any]()
    try:
        faults = [(0, 0, "validation"), (0, 5, "forward"), (0, 12, "validation")]
        with running(Recording(Commit(), [])):
            look = {"harm": lambda number: found.append(signal.getsignal(signal.SIGTERM))}
            fit({"faults": faults, "marks": str(tmp_path), **look})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [on_notice] * 3


class Listing(Logger):
    """A logger of one's own, which all attempts share."""

    name, version = "own", 0

    def __init__(self) -> None:
        self.points: list[tuple[str, int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.points += [(each, step) for each in metrics if each != "epoch"]

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def test_a_logger_of_ones_own_has_each_point_once_and_logs_at_once_after_the_fit(tmp_path: Path) -> None:
    logger = Listing()
    given = {"trainer": {"logger": logger}, "faults": [(0, 5, "forward"), (0, 12, "validation")]}
    assert attempts({**given, "marks": str(tmp_path)})["attempts"] == 3
    assert [each for each in logger.points if each[0] == "train_loss"] == [("train_loss", 11), ("train_loss", 23)]
    logger.log_metrics({"final": 1.0}, 24)
    assert logger.points[-1] == ("final", 24)

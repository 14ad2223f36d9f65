"""If no worker is left, new processes resume from the newest snapshot, and `batches_redone` is correct."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ElasticConfig
from raysgd.callbacks import Callback, Underway
from tests.faults import Fault, Ground, LedgerOperator, until

pytestmark = pytest.mark.elastic


def alone(path: Path, operator: type[LedgerOperator] = LedgerOperator, **elastic: Any) -> Ground:
    settings = ElasticConfig(**elastic)
    return Ground(path, num_workers=1, use_ray=True, elastic=settings, config={"pace": 0.005}, operator=operator)


class WaitingForTheDriver(LedgerOperator):
    """Sends a progress message after batch 70 of the trainer, and lets no batch after the 79th begin before the driver has
    seen one of the messages after batch 65."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        seen = Path(self.config["marks"], "seen")
        if self.global_step == 69:
            time.sleep(0.3)  # messages are at least 0.1 s apart
        while self.global_step == 79 and not seen.exists():
            time.sleep(0.01)
        return super().train_batch(batch, batch_info)


class MarksProgress(Callback):
    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def on_progress(self, now: Underway) -> None:
        if now.progress.step >= 65:
            (self.marks / "seen").touch()


class EndsInTheFirstSave(LedgerOperator):
    """Ends its process once, when its state is saved."""

    def state_dict(self) -> dict[str, Any]:
        mark = Path(self.config["marks"], "saving")
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


def test_an_older_state_is_not_saved_under_the_name_of_the_newer_one(ray_cluster: None, tmp_path: Path) -> None:
    ground = alone(tmp_path / "marks", EndsInTheFirstSave, snapshot_every=None)
    try:
        ground.trainer.train()
        (tmp_path / "marks" / "saving").touch()
        with pytest.raises(CheckpointError, match=r"all workers failed during 'save'.*nothing was saved"):
            ground.trainer.save(tmp_path / "new.pt")
        assert os.listdir(tmp_path) == ["marks"] and ground.trainer.world_size == 1
        ground.trainer.save(tmp_path / "old.pt")  # now the user knows what it is
    finally:
        ground.trainer.shutdown()


def test_one_worker_resumes_from_the_end_of_the_last_epoch(ray_cluster: None, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    ground = Ground(
        marks,
        num_workers=1,
        use_ray=True,
        config={"pace": 0.005},
        operator=WaitingForTheDriver,
        callbacks=[MarksProgress(marks)],
    )
    try:
        ground.trainer.train()
        snapshots = ground.trainer._engine._table.snapshots
        for _ in until(lambda: (newest := snapshots.latest()) is not None and newest.progress.step == 60):
            ground.trainer.apply_all_workers(os.getpid)  # the snapshot is sent in a thread
        ground.assert_epoch_exact()
        ground.arm(Fault(0, 20))
        result = ground.trainer.train()
        ground.assert_epoch_exact()
        failure = ground.trainer.recoveries[-1]
        assert (failure.in_place, failure.world_size_after) == (False, 1)
        assert 5 <= failure.batches_redone <= 19  # up to the last message that the driver has seen
        assert (result["epoch"], result["num_samples"], result["batch_count"]) == (2, 240, 60)
    finally:
        ground.trainer.shutdown()


class StoppedInSetup(LedgerOperator):
    """The process after the first one is stopped in its setup, once."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        first, second = Path(config["marks"], "first"), Path(config["marks"], "second")
        if first.exists() and not second.exists():
            second.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        first.touch()


def test_a_new_process_that_is_stopped_in_its_setup_does_not_block_training(ray_cluster: None, tmp_path: Path) -> None:
    ground = alone(tmp_path / "marks", StoppedInSetup, hang_timeout_s=5)
    try:
        ground.trainer.train()
        ground.assert_epoch_exact()
        ground.arm(Fault(0, 20))
        ground.trainer.train()
        ground.assert_epoch_exact()
        assert (tmp_path / "marks" / "second").exists()
    finally:
        ground.trainer.shutdown()


def test_with_frequent_snapshots_few_batches_are_repeated(ray_cluster: None, tmp_path: Path) -> None:
    ground = alone(tmp_path / "marks", snapshot_every=10)
    try:
        ground.arm(Fault(0, 28))
        result = ground.trainer.train()
        ground.assert_epoch_exact()
        assert ground.trainer.recoveries[-1].batches_redone <= 18
        assert result["num_samples"] == 240
    finally:
        ground.trainer.shutdown()


def test_without_snapshots_training_starts_over(ray_cluster: None, tmp_path: Path) -> None:
    ground = alone(tmp_path / "marks", snapshot_every=None)
    try:
        ground.trainer.train(num_steps=60)
        ground.arm(Fault(0, 5))
        ground.trainer.train()
        assert ground.trainer.recoveries[-1].batches_redone >= 60
        assert Counter(ground.trainer.apply_all_operators(lambda op: list(op.ledger))[0]) == Counter(range(240))
    finally:
        ground.trainer.shutdown()


def test_a_preemption_notice_to_the_only_worker_repeats_no_batch(ray_cluster: None, tmp_path: Path) -> None:
    ground = alone(tmp_path / "marks")
    try:
        ground.arm(Fault(0, 20, "term"))
        for _ in until(lambda: bool(ground.trainer.recoveries)):  # until its replacement has started
            ground.trainer.train()
            ground.assert_epoch_exact()
        notice = ground.trainer.recoveries[-1]
        assert (notice.reason, notice.batches_redone) == ("preemption", 0)
    finally:
        ground.trainer.shutdown()


def test_metrics_from_before_the_snapshot_count(ray_cluster: None, tmp_path: Path) -> None:
    """One worker fails, and then the other: the snapshot's count begins at the first failure."""
    elastic = ElasticConfig(snapshot_every=5, grow=False)
    ground = Ground(tmp_path / "marks", num_workers=2, elastic=elastic, config={"pace": 0.01})
    try:
        ground.arm(Fault(1, 9), Fault(0, 25))
        result = ground.trainer.train()
        ground.assert_epoch_exact()
        assert [recovery.in_place for recovery in ground.trainer.recoveries] == [True, False]
        steps = ground.trainer.apply_all_operators(lambda operator: operator.global_step)[0]
        assert (result["num_samples"], result["batch_count"]) == (240, steps)
    finally:
        ground.trainer.shutdown()

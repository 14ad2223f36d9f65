"""If no worker is left, new processes resume from the newest snapshot, and `batches_redone` is correct. tests/local/test_calls.py has
other snapshots, and none."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import Callback, Underway
from tests.faults import Fault, Ground, LedgerOperator, until
from tests.peek import newest_snapshot

pytestmark = pytest.mark.elastic


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
        for _ in until(lambda: (newest := newest_snapshot(ground.trainer)) is not None and newest.progress.step == 60):
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

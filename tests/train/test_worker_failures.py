"""New workers join a function when it saves. tests/contracts/test_function.py has the failures of workers without new ones,
tests/elastic/test_function_faults.py those in `train.elastic`, and no worker that is left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train
from raysgd.train import Checkpoint, Trainer
from raysgd.train.sessions import current as session
from tests.faults import once

pytestmark = pytest.mark.elastic


def kill_once(config: dict[str, Any]) -> None:
    if once(Path(config["marks"], "killed")):
        os.kill(os.getpid(), signal.SIGKILL)


def test_new_workers_join_at_a_checkpoint(ray_cluster: None, tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> list[tuple[int, int]]:
        found = train.load_checkpoint()
        history = [] if found is None else found["history"]
        while train.world_size() < 2 or len(history) < 4:
            if train.world_rank() == 1 and len(history) == 2:
                kill_once(config)
            history = [*history, train.world_size()]
            train.save_checkpoint(history=history)
            time.sleep(0.1)
        return history

    with Trainer("none", num_workers=2, logdir=tmp_path / "logs") as trainer:
        first, second = trainer.run(function, {"marks": str(tmp_path)})
        assert first == second, "no step was lost or repeated"
        assert first[:2] == [2, 2] and 1 in first
        assert [recovery.reason for recovery in trainer.recoveries] == ["worker death", "growth"]


def test_a_run_that_begins_with_fewer_workers_says_so(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function(config: dict[str, Any]) -> tuple[int, int]:
        if train.world_rank() == 1:
            kill_once(config)
        return train.world_size(), session("a test").planned_ranks

    elastic = ElasticConfig(grow=False)
    with Trainer("none", num_workers=2, logdir=tmp_path / "logs", elastic=elastic) as trainer:
        for _ in range(2):
            assert trainer.run(function, {"marks": str(tmp_path)}) == [(1, 2)]
    begins = [each.getMessage() for each in caplog.records if "this run begins" in each.getMessage()]
    assert len(begins) == 1 and begins[0].startswith("this run begins with 1 worker of 2")


@pytest.mark.more
def test_new_workers_join_although_only_rank_0_saves(ray_cluster: None, tmp_path: Path) -> None:
    """Rank 0 stops at its checkpoint. The other ranks save none, and are interrupted in their collective call."""

    def function(config: dict[str, Any]) -> list[int]:
        import torch
        import torch.distributed as dist

        found = train.get_checkpoint()
        history = [] if found is None else found.to_dict()["history"]
        while train.world_size() < 3 or len(history) < 4:
            if train.world_rank() == 2 and len(history) == 2:
                kill_once(config)
            present = torch.ones(1)
            dist.all_reduce(present)
            history = [*history, int(present)]
            checkpoint = Checkpoint.from_dict({"history": history}) if train.world_rank() == 0 else None
            train.report({"epoch": len(history)}, checkpoint=checkpoint)
            time.sleep(0.05)
        return history

    with Trainer("torch", num_workers=3, logdir=tmp_path / "logs") as trainer:
        first, second, third = trainer.run(function, {"marks": str(tmp_path)})
        assert first == second == third
        assert first[:2] == [3, 3] and 2 in first
        growth = trainer.recoveries[-1]
        assert (growth.reason, growth.world_size_after, growth.in_place) == ("growth", 3, True)

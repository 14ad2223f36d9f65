"""Workers fail while a function is running. The others run it again, from the newest checkpoint. tests/elastic/test_function_faults.py has
other failures, `train.elastic`, and no worker that is left."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.actor import exit_actor

from raysgd import ElasticConfig, train
from raysgd.train import Checkpoint, Trainer
from tests.faults import once

pytestmark = pytest.mark.elastic


def kill_once(config: dict[str, Any], name: str = "killed") -> None:
    if once(Path(config["marks"], name)):
        if config.get("exits"):
            exit_actor()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def marks(tmp_path: Path) -> str:
    (tmp_path / "marks").mkdir()
    return str(tmp_path / "marks")


@pytest.fixture
def made(ray_cluster: None, tmp_path: Path) -> Any:
    trainers: list[Trainer] = []

    def make(backend: Any = "none", num_workers: int = 3, **arguments: Any) -> Trainer:
        trainer = Trainer(backend, num_workers=num_workers, logdir=tmp_path / "logs", **arguments)
        trainers.append(trainer)
        trainer.start()
        return trainer

    yield make
    for trainer in trainers:
        trainer.shutdown()


Make = Callable[..., Trainer]
NO_GROWTH = ElasticConfig(grow=False)


def wait_for_all(marks: str, epoch: int) -> None:
    """Wait for every rank, like a collective call."""
    size = train.world_size()
    Path(marks, f"{size}-{epoch}-{train.world_rank()}").touch()
    while not all(Path(marks, f"{size}-{epoch}-{rank}").exists() for rank in range(size)):
        time.sleep(0.01)


def epochs(config: dict[str, Any]) -> dict[str, Any]:
    """Run five epochs with one checkpoint each. One rank is killed after the checkpoint of epoch 2."""
    found = train.load_checkpoint()
    start = 0 if found is None else found["epoch"] + 1
    for epoch in range(start, 5):
        train.save_checkpoint(epoch=epoch)
        if epoch == 2 and train.world_rank() == config["rank"] and train.world_size() == 3:
            kill_once(config)
        train.report(epoch=epoch)
        wait_for_all(config["marks"], epoch)
    return {"pid": os.getpid(), "rank": train.world_rank(), "size": train.world_size(), "start": start}


@pytest.mark.parametrize(("rank", "exits"), [(0, True), (2, False)])
def test_the_survivors_run_the_function_again(made: Make, marks: str, rank: int, exits: bool) -> None:
    """Also if the function calls Ray's `exit_actor`, which ends its process on purpose."""
    trainer = made(elastic=NO_GROWTH)
    pids = trainer.worker_group.execute(os.getpid)
    rounds = trainer.run_iterator(epochs, {"marks": marks, "rank": rank, "exits": exits})
    seen = [[row["epoch"] for row in rows] for rows in rounds]
    results = rounds.get_final_results()
    assert results is not None
    survivors = [pid for old_rank, pid in enumerate(pids) if old_rank != rank]
    assert [result["pid"] for result in results] == survivors, "in the surviving processes, in their old order"
    assert [(result["rank"], result["size"]) for result in results] == [(0, 2), (1, 2)]
    assert results[0]["start"] == 3, "no saved checkpoint is lost"
    assert seen[-1] == [4, 4]
    assert {row for rows in seen for row in rows} >= {0, 1, 4}
    (failure,) = trainer.recoveries
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("worker death", (rank,), True)
    assert failure.seconds < 20, "no limit had to expire"


def test_new_workers_join_at_a_checkpoint(made: Make, marks: str) -> None:
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

    trainer = made(num_workers=2)
    first, second = trainer.run(function, {"marks": marks})
    assert first == second, "no step was lost or repeated"
    assert first[:2] == [2, 2] and 1 in first
    reasons = [recovery.reason for recovery in trainer.recoveries]
    assert reasons == ["worker death", "growth"]


@pytest.mark.more
def test_new_workers_join_although_only_rank_0_saves(made: Make, marks: str) -> None:
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

    trainer = made("torch", num_workers=3)
    first, second, third = trainer.run(function, {"marks": marks})
    assert first == second == third
    assert first[:2] == [3, 3] and 2 in first
    growth = trainer.recoveries[-1]
    assert (growth.reason, growth.world_size_after, growth.in_place) == ("growth", 3, True)

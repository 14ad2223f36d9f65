"""Runs with checkpoints in remote storage: on an S3 server, and in fsspec's memory."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ElasticConfig, train
from raysgd.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingCallback,
)
from tests import storing

BEST = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of such runs on this machine."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "ray_results"


@pytest.fixture
def bucket(s3: str) -> str:
    return f"{s3}/{uuid.uuid4().hex}/runs"


@pytest.fixture
def made(ray_cluster: None) -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def make(logdir: Any, num_workers: int = 1, **arguments: Any) -> Trainer:
        trainers.append(Trainer("none", num_workers=num_workers, logdir=logdir, **arguments))
        trainers[-1].start()
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.shutdown()


def epochs(config: dict[str, Any]) -> int:
    found = train.load_checkpoint()
    start = 0 if found is None else found["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        train.save_checkpoint(epoch=epoch, loss=[2, 4, 1, 3, 9][epoch])
        train.report(epoch=epoch)
    return start


class Writing(TrainingCallback):
    """Writes into the run's directory, like a logger."""

    def start_training(self, logdir: str) -> None:
        self.file = Path(logdir) / "seen" / "rounds.txt"
        self.file.parent.mkdir()

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{results[0]['epoch']}\n")


def test_a_trainer_stores_its_runs_on_s3(made: Callable[..., Trainer], bucket: str, home: Path) -> None:
    trainer = made(bucket)
    trainer.run(epochs, {"epochs": 4}, callbacks=[Writing()], checkpoint_strategy=BEST)
    folder = f"{bucket}/run_001/checkpoints"
    assert str(trainer.latest_checkpoint_dir) == folder
    assert storing.names(folder) == ["checkpoint_000001", "checkpoint_000003"]
    assert str(trainer.best_checkpoint_path) == str(trainer.latest_checkpoint_path) == f"{folder}/checkpoint_000003"
    assert Checkpoint(f"{folder}/checkpoint_000003").to_dict()["epoch"] == 2
    assert trainer.latest_checkpoint is not None and trainer.latest_checkpoint["epoch"] == 3
    assert trainer.latest_run_dir == home / "runs" / "run_001"
    assert storing.read(f"{bucket}/run_001/seen/rounds.txt") == b"0\n1\n2\n3\n"

    (home / "runs" / "run_001" / "later.txt").touch()
    with pytest.raises(ValueError, match=f"no checkpoint at {bucket}/absent"):
        trainer.run(epochs, {"epochs": 4}, checkpoint=f"{bucket}/absent")
    assert storing.names(f"{bucket}/run_001") == ["checkpoints", "seen"], "no run has ended, so no logs are copied"

    assert trainer.run(epochs, {"epochs": 4}, checkpoint=f"{folder}/checkpoint_000003") == [3]
    assert trainer.run(epochs, {"epochs": 4}, checkpoint=trainer.latest_checkpoint_path) == [4]
    trainer.run(epochs, {"epochs": 1}, checkpoint_strategy=CheckpointConfig(num_to_keep=0))
    assert (trainer.latest_checkpoint_path, trainer.best_checkpoint_path) == (None, None)
    assert trainer.latest_checkpoint["epoch"] == 0
    with_checkpoints = [name for name in storing.names(bucket) if "checkpoints" in names_in(bucket, name)]
    assert with_checkpoints == ["run_001", "run_002"], (
        "the third run saved nothing, and the fourth keeps none in storage"
    )

    assert Trainer("none", logdir=bucket)._find_next() == 5, "the runs of another trainer get other names"


def names_in(bucket: str, name: str) -> list[str]:
    return storing.names(f"{bucket}/{name}")


def test_a_missing_bucket_is_an_error_before_the_run(made: Callable[..., Trainer], s3: str) -> None:
    trainer = made("s3://no-such-bucket/runs")
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/runs/run_001.* cannot be written"):
        trainer.run(epochs, {"epochs": 1})
    assert trainer.latest_run_dir is None, "the function has not started"
    assert trainer.run(lambda: 5, checkpoint_strategy=CheckpointConfig(num_to_keep=0)) == [5]


# -- failures right after a call ----------------------------------------------------------------------


def save_and_die(config: dict[str, Any]) -> Any:
    """Save a checkpoint, and kill the only worker in the next line."""
    found = train.get_checkpoint()
    if found is not None:
        with found.as_directory() as folder:
            return {"text": Path(folder, "text").read_text()} if config["folder"] else found.to_dict()
    if config["folder"]:
        Path(config["folder"]).mkdir()
        Path(config["folder"], "text").write_text("last")
        train.report({"loss": 1}, checkpoint=Checkpoint.from_directory(config["folder"]))
    elif config["report"]:
        train.report({"loss": 1}, checkpoint=Checkpoint.from_dict({"text": "last"}))
    else:
        train.save_checkpoint(text="last")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.elastic
@pytest.mark.parametrize(
    ("method", "keep", "remote"),
    [
        ("report", None, True),
        pytest.param("folder", None, True, marks=pytest.mark.more),
        ("save_checkpoint", 1, False),
        ("report", 0, False),
    ],
)
def test_a_checkpoint_is_not_lost_if_its_worker_fails_right_after_the_call(
    made: Callable[..., Trainer], bucket: str, tmp_path: Path, method: str, keep: int | None, remote: bool
) -> None:
    trainer = made(bucket if remote else tmp_path / "logs", elastic=ElasticConfig(grow=False))
    config = {"report": method == "report", "folder": str(tmp_path / "text") if method == "folder" else ""}
    (result,) = trainer.run(save_and_die, config, checkpoint_strategy=CheckpointConfig(num_to_keep=keep))
    assert result["text"] == "last"
    assert [recovery.reason for recovery in trainer.recoveries] == ["worker death"]
    path = trainer.latest_checkpoint_path
    if keep == 0:
        assert path is None
        return
    assert path is not None
    with Checkpoint.from_uri(path).as_directory() as folder:
        assert (Path(folder) / "text").exists() == (method == "folder")
    assert str(path).startswith("s3://") == remote


# -- fit ----------------------------------------------------------------------------------------------


def failing(config: dict[str, Any]) -> None:
    found = train.get_checkpoint()
    start = 0 if found is None else found.to_dict()["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        train.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))
        if epoch == config.get("fails_at"):
            raise ValueError("mine")


def test_fit_is_stored_on_s3_and_restored_from_there(ray_cluster: None, bucket: str, home: Path) -> None:
    trainer = DataParallelTrainer(
        failing,
        train_loop_config={"epochs": 4, "fails_at": 1},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="mine", storage_path=bucket, checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    path = f"{bucket}/mine"
    assert not DataParallelTrainer.can_restore(path)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit()
    assert DataParallelTrainer.can_restore(path)
    assert str(Result.from_path(path).error) == "ValueError: mine"
    for local in sorted((home / "mine").iterdir()):
        local.unlink()  # another machine does not have these files
    result = DataParallelTrainer.restore(path, train_loop_config={"epochs": 4}).fit()
    assert [row["epoch"] for row in result.history] == [0, 1, 2, 3], "it resumed from the checkpoint"
    assert result.path == path and result.log_dir == home / "mine"
    assert result.checkpoint is not None
    assert result.checkpoint.get_internal_representation() == ("uri", f"{path}/checkpoint_000003")
    assert [name for name in storing.names(path) if name.startswith("checkpoint")] == [
        "checkpoint_000002",
        "checkpoint_000003",
    ]
    again = DataParallelTrainer(
        failing,
        train_loop_config={"epochs": 5},
        run_config=RunConfig(name="mine", storage_path=bucket),
        resume_from_checkpoint=f"{path}/checkpoint_000003",
    ).fit()
    assert again.path == f"{bucket}/mine_2", "a run never writes into another run's directory"
    assert [row["epoch"] for row in again.history] == [4]

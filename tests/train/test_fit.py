"""`DataParallelTrainer` and its subclasses: one call of `fit()`, and the files that it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raysgd import train
from raysgd.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    TorchTrainer,
)

TWO = ScalingConfig(num_workers=2)


def in_folder(folder: Path, **more: Any) -> RunConfig:
    return RunConfig(storage_path=folder, **more)


def epochs(config: dict[str, Any]) -> int:
    """Report and save each epoch after the newest checkpoint."""
    found = train.get_checkpoint()
    start = 0 if found is None else found.to_dict()["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        saved = Checkpoint.from_dict({"epoch": epoch, "loss": config["losses"][epoch]})
        train.report({"loss": 2, "epoch": epoch, "size": train.world_size()}, checkpoint=saved)
        if epoch == config.get("fails_at"):
            torch.distributed.barrier()  # so that both ranks have reported this epoch
            raise ValueError("mine")
    return start


LOSSES = {"losses": [2, 4, 1, 3, 0], "epochs": 4}


def test_the_result_of_a_run(ray_cluster: None, tmp_path: Path) -> None:
    best = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    trainer = DataParallelTrainer(
        epochs, train_loop_config=LOSSES, scaling_config=TWO, run_config=in_folder(tmp_path, checkpoint_config=best)
    )
    result = trainer.fit()
    assert result.error is None
    assert result.metrics["epoch"] == 3
    assert result.metrics["training_iteration"] == result.metrics["_training_iteration"] == 4
    assert result.metrics["config"] == {"train_loop_config": LOSSES} == result.config
    assert result.metrics["done"] is True
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict()["epoch"] == 3, "the newest, although it is not stored"
    kind, where = result.best_checkpoints[0][0].get_internal_representation()
    assert (kind, where) == ("local_path", str(result.log_dir / "checkpoint_000000"))
    assert [Path(str(kept.path)).name for kept, _ in result.best_checkpoints] == [
        "checkpoint_000000",
        "checkpoint_000002",
    ]
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 2]
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3]
    assert Path(result.path) == result.log_dir
    assert result.log_dir.parent == tmp_path
    assert result.log_dir.name.startswith("DataParallelTrainer_")
    assert list(result.return_values) == [0, 0]
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 8:
        assert time.monotonic() < deadline, "a run leaves nothing in the cluster"
        time.sleep(0.1)
    again = Result.from_path(result.path)
    assert again.metrics == json.loads(json.dumps(result.metrics))
    assert [metrics["epoch"] for _, metrics in again.best_checkpoints] == [0, 2]


def test_resuming_metadata_and_context(ray_cluster: None, tmp_path: Path) -> None:
    def loop() -> dict[str, Any]:
        context, found = train.get_context(), train.get_checkpoint()
        assert found is not None
        train.report({}, checkpoint=Checkpoint.from_dict({"epoch": found.to_dict()["epoch"] + 1}))
        return {
            "metadata": context.get_metadata(),
            "names": (context.get_experiment_name(), context.get_trial_dir()),
            "ranks": (context.get_world_rank(), context.get_local_rank(), context.get_world_size()),
            "hook": os.environ.get("RAYSGD_HOOK"),
        }

    trainer = DataParallelTrainer(
        loop,
        scaling_config=TWO,
        metadata={"who": ["me"]},
        initialization_hook=lambda: os.environ.update(RAYSGD_HOOK="1"),
        resume_from_checkpoint=Checkpoint.from_dict({"epoch": 7}),
        run_config=in_folder(tmp_path, name="run", checkpoint_config=CheckpointConfig(num_to_keep=0)),
    )
    result = trainer.fit()
    assert [each["metadata"] for each in result.return_values] == [{"who": ["me"]}] * 2
    assert result.return_value["names"] == ("run", str(tmp_path / "run"))
    assert result.return_value["hook"] == "1"
    with pytest.raises(ValueError, match="initialization_hook must be a function"):
        DataParallelTrainer(loop, initialization_hook=5)  # type: ignore[arg-type]
    assert {each["ranks"] for each in result.return_values} == {(0, 0, 2), (1, 1, 2)}
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict()["epoch"] == 8
    assert result.checkpoint.get_metadata() == {"who": ["me"]}
    assert result.checkpoint.get_internal_representation()[0] == "data_dict", "it is in memory only"
    assert not result.best_checkpoints and not list(result.log_dir.glob("checkpoint*"))
    second = trainer.fit()
    assert second.log_dir == tmp_path / "run_2", "a run never writes into another run's directory"


def test_a_run_that_raised_an_error_can_be_restored(ray_cluster: None, tmp_path: Path) -> None:
    trainer = TorchTrainer(
        epochs,
        train_loop_config={**LOSSES, "fails_at": 1},
        scaling_config=TWO,
        run_config=in_folder(tmp_path, name="run", checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    with pytest.raises(ValueError, match="mine"):
        trainer.fit()
    path = tmp_path / "run"
    assert not TorchTrainer.can_restore(tmp_path) and TorchTrainer.can_restore(path)
    failed = Result.from_path(path)
    assert "ValueError: mine" in str(failed.error)
    assert failed.metrics["epoch"] == 1

    restored = TorchTrainer.restore(path, train_loop_config=LOSSES)
    assert restored.scaling_config == TWO
    assert restored.train_loop_per_worker is not epochs, "the function was restored too"
    result = restored.fit()
    assert Path(result.path) == path
    assert list(result.return_values) == [2, 2], "from the newest checkpoint"
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3]
    assert list(result.metrics_dataframe["training_iteration"]) == [1, 2, 3, 4]
    assert result.metrics["iterations_since_restore"] == 2
    rows = result.metrics_dataframe
    assert list(rows["done"]) == [False, False, False, True]
    assert rows["time_total_s"].is_monotonic_increasing and len(set(rows["trial_id"])) == 1
    kept = [Path(str(kept.path)).name for kept, _ in result.best_checkpoints]
    assert kept == ["checkpoint_000002", "checkpoint_000003"], "numbers continue, and older checkpoints are deleted"


@pytest.mark.elastic
def test_a_run_can_be_restored_from_an_older_checkpoint(ray_cluster: None, tmp_path: Path) -> None:
    def loop() -> int:
        found = train.get_checkpoint()
        number = 1 if found is None else found.to_dict()["number"] + 1
        train.report({}, checkpoint=Checkpoint.from_dict({"number": number}))
        return number

    run, restore = tmp_path / "run", DataParallelTrainer.restore
    numbers = [DataParallelTrainer(loop, run_config=in_folder(tmp_path, name="run")).fit().return_value]
    numbers += [
        restore(run, **given).fit().return_value
        for given in ({}, {"resume_from_checkpoint": run / "checkpoint_000000"}, {})
    ]
    assert numbers == [1, 2, 2, 3]
    assert len(list(run.glob("checkpoint_*"))) == 4, "numbers continue"


def test_a_range_of_workers_starts_with_as_many_as_there_is_room_for(ray_cluster: None, tmp_path: Path) -> None:
    """Each worker needs 3 of the cluster's 8 CPUs, so there is room for two of the four."""
    wanted = ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 3})
    result = DataParallelTrainer(train.world_size, scaling_config=wanted, run_config=in_folder(tmp_path)).fit()
    assert list(result.return_values) == [2, 2]


def test_a_subclass_with_its_own_loop_and_backend(ray_cluster: None, tmp_path: Path) -> None:
    from dataclasses import dataclass

    from raysgd.train import Backend, BackendConfig

    class Custom(Backend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            def set_variable(value: str) -> None:
                os.environ["RAYSGD_MINE"] = value

            worker_group.execute(set_variable, backend_config.text)

    @dataclass
    class CustomConfig(BackendConfig):
        text: str = "default"

        def backend_cls(self) -> type[Backend]:  # type: ignore[override]
            return Custom

    class Fixed(DataParallelTrainer):
        def __init__(self, config: CustomConfig, **settings: Any) -> None:
            super().__init__(lambda: os.environ["RAYSGD_MINE"], backend_config=config, **settings)

    result = Fixed(CustomConfig("good day"), run_config=in_folder(tmp_path, name="run")).fit()
    assert result.return_value == "good day"
    assert Fixed.restore(tmp_path / "run").fit().return_value == "good day", "the loop is stored too"
    with pytest.raises(ValueError, match=r"call Fixed\.restore"):
        DataParallelTrainer.restore(tmp_path / "run")


SCRIPT = """
import os, sys, time
from pathlib import Path
from raysgd import train
from raysgd.train import Checkpoint, DataParallelTrainer, RunConfig, TrainingCallback

class Killing(TrainingCallback):
    def handle_result(self, results):
        if results[0]["epoch"] == 1:
            os.kill(os.getpid(), 9)

def loop():
    for epoch in range(3):
        train.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))
        time.sleep(60 * (epoch == 1))

run = RunConfig(name="run", storage_path=sys.argv[1], callbacks=[Killing()])
DataParallelTrainer(loop, run_config=run).fit()
"""


@pytest.mark.elastic
def test_a_run_can_be_restored_after_its_script_was_killed(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": address}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Result.from_path(tmp_path / "run").metrics["epoch"] == 1, "the reports so far can be read"

    def rest() -> None:
        found = train.load_checkpoint()
        assert found is not None
        for epoch in range(found["epoch"] + 1, 4):
            train.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))

    result = DataParallelTrainer.restore(tmp_path / "run", train_loop_per_worker=rest).fit()
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3], "including the report whose callback was killed"
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3]

"""What the ways to run a training function have in common: a trainer's iterator, `fit()`, and a trial of Tune. `Trainer.run` is in
test_function.py.

Each runs the same function on two workers, one of which is killed. So each row was reported once, the checkpoints are in order, and
the function went on after the newest one.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train
from raysgd.callbacks import Callback, CallResult
from raysgd.train import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig, Trainer
from tests.callbacks.recording import Heard
from tests.faults import once, until

STEPS, KILLED_AFTER = 4, 1
NO_GROWTH = ElasticConfig(grow=False)  # it would let the function begin again later
Seen = tuple[list[dict[str, Any]], dict[str, Any]]


def all_exist(files: list[Path]) -> bool:
    return all(file.exists() for file in files)


def learn(config: dict[str, Any]) -> None:
    """Report steps, each with its checkpoint. Rank 1 is killed once, when both ranks have reported a step."""
    folder, rank, size = Path(config["folder"]), train.world_rank(), train.world_size()
    found = train.load_checkpoint()
    first = 0 if found is None else found["step"] + 1
    (folder / f"first-{first}").touch()
    for step in range(first, STEPS):
        train.report({"step": step, "first": first}, checkpoint=Checkpoint.from_dict({"step": step}))
        killed = step == KILLED_AFTER and rank == 1 and once(folder / "killed")
        if not killed:
            (folder / f"{size}-{step}-{rank}").touch()
        others = [folder / f"{size}-{step}-{each}" for each in range(1 if killed else size)]
        for _ in until(partial(all_exist, others)):  # as in a collective call
            time.sleep(0.01)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)


def with_an_iterator(config: dict[str, Any], folder: Path) -> Seen:
    with Trainer("none", num_workers=2, logdir=folder, max_retries=1, elastic=NO_GROWTH) as trainer:
        rows = [rows[0] for rows in trainer.run_iterator(learn, config)]
        assert trainer.latest_checkpoint is not None
        return rows, trainer.latest_checkpoint


def trainer_of(config: dict[str, Any], folder: Path, *callbacks: Callback) -> DataParallelTrainer:
    failures = train.FailureConfig(max_failures=1)
    run_config = RunConfig(storage_path=folder, failure_config=failures, callbacks=list(callbacks))
    scaling = ScalingConfig(num_workers=2, elastic=NO_GROWTH)
    return DataParallelTrainer(learn, train_loop_config=config, scaling_config=scaling, run_config=run_config)


class Late(Callback):
    """Returns from the first result when the function runs again, so all that happened until then is seen later."""

    def __init__(self, folder: str) -> None:
        self.again = Path(folder, f"first-{KILLED_AFTER + 1}")

    def on_result(self, result: CallResult) -> None:
        for _ in until(self.again.exists):
            time.sleep(0.01)


def with_fit(config: dict[str, Any], folder: Path) -> Seen:
    heard = Heard()
    result = trainer_of(config, folder, heard, Late(config["folder"])).fit()
    assert result.checkpoint is not None
    failure, *_ = heard.named("recovery")
    assert (failure.reason, failure.step) == ("worker death", KILLED_AFTER + 1), "over the reports, like the results"
    assert failure.time > 0 and "join" in failure.phases
    return list(result.history), result.checkpoint.to_dict()


def in_a_trial(config: dict[str, Any], folder: Path) -> Seen:
    tune = pytest.importorskip("ray.tune", reason="needs Ray Tune (raysgd[tune])")
    settings = tune.RunConfig(storage_path=str(folder), verbose=0)
    (result,) = tune.Tuner(trainer_of(config, folder).as_trainable(), run_config=settings).fit()
    with result.checkpoint.as_directory() as files:
        checkpoint = Checkpoint(files).to_dict()
    return result.metrics_dataframe.to_dict("records"), checkpoint


Run = Callable[[dict[str, Any], Path], Seen]


@pytest.mark.elastic
@pytest.mark.parametrize("run", [with_an_iterator, with_fit, pytest.param(in_a_trial, marks=pytest.mark.more)])
def test_no_report_is_lost_or_doubled_when_a_worker_fails(ray_cluster: None, tmp_path: Path, run: Run) -> None:
    rows, checkpoint = run({"folder": str(tmp_path)}, tmp_path / "runs")
    resumed_at = KILLED_AFTER + 1
    assert [(row["step"], row["first"]) for row in rows] == [
        (step, 0 if step < resumed_at else resumed_at) for step in range(STEPS)
    ]
    assert checkpoint["step"] == STEPS - 1 and (tmp_path / "killed").exists()

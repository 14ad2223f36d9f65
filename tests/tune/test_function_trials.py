"""Training functions as Tune trials: settings, placement, checkpoints, failures of workers and of trials."""

import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
import raysgd.tune
from raysgd import ConfigError, train
from raysgd.train import Checkpoint, DataParallelTrainer, ScalingConfig, TorchTrainer, Trainer
from tests.faults import once

tune = pytest.importorskip("ray.tune", reason="needs Ray Tune (raysgd[tune])")


def run_config(folder: Path, **more: Any) -> Any:
    return tune.RunConfig(storage_path=str(folder), verbose=0, **more)


def wait_for_free_cpus() -> None:
    """Wait until no trial uses a CPU. Ray notices this a little later."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 8:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


def learn(config: dict[str, Any]) -> None:
    found = train.load_checkpoint()
    start = 0 if found is None else found["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        held = ray.util.get_current_placement_group()
        train.report(
            {"score": config["rate"] * (epoch + 1), "epoch": epoch, "start": start, "size": train.world_size()}
            | {"bundles": None if held is None else held.bundle_specs, "trial": train.get_context().get_trial_id()},
            checkpoint=Checkpoint.from_dict({"epoch": epoch, "rate": config["rate"]}),
        )
        time.sleep(config["pause"])


def test_tune_accepts_a_trainer(ray_cluster: None, tmp_path: Path) -> None:
    """Pass the trainer to Ray's own Tuner. The trial overrides one value of the loop's config, and is stopped long before the
    loop's end."""
    trainer = TorchTrainer(
        learn,
        train_loop_config={"epochs": 10_000, "rate": 0, "pause": 0.05},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1.5}),
    )
    results = tune.Tuner(
        trainer,
        param_space={"train_loop_config": {"rate": tune.grid_search([1, 3])}},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=run_config(tmp_path, stop={"training_iteration": 3}),
    ).fit()
    assert not results.errors
    assert [result.metrics["training_iteration"] for result in results] == [3, 3]
    best = results.get_best_result()
    assert (best.metrics["score"], best.metrics["size"]) == (9, 2)
    assert best.metrics["trial"] == best.metrics["trial_id"]
    assert best.metrics["bundles"] == [{"CPU": 1}, {"CPU": 1.5}, {"CPU": 1.5}], "the workers use the trial's bundles"
    with best.checkpoint.as_directory() as folder:
        assert {"epoch": 2, "rate": 3}.items() <= Checkpoint(folder).to_dict().items()
    going_on = DataParallelTrainer(learn, resume_from_checkpoint=best.checkpoint)
    newest = going_on.job().make_manager(tmp_path).latest
    assert newest is not None and newest.to_dict()["epoch"] == 2, "training can start from a trial's checkpoint"
    assert len(best.best_checkpoints) == 3, "Tune keeps the checkpoint of each report"
    wait_for_free_cpus()


class RecordsProcess(DataParallelTrainer):
    """Writes the id of the trial's process to a file."""

    def setup(self) -> None:
        folder = Path((self.train_loop_config or {})["marks"])
        (folder / "trial").write_text(str(os.getpid()))


def failing_twice(config: dict[str, Any]) -> None:
    """Rank 1 is killed in epoch 1, and the trial in epoch 3. Checkpoints are directories."""
    marks = Path(config["marks"])
    found = train.get_checkpoint()
    start = 0
    if found is not None:
        with found.as_directory() as folder:
            start = int((Path(folder) / "epoch.txt").read_text()) + 1
    for epoch in range(start, 5):
        if epoch == 1 and train.world_rank() == 1 and once(marks / "worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 3 and train.world_rank() == 0 and (marks / "stored").exists() and once(marks / "trial_killed"):
            os.kill(int((marks / "trial").read_text()), signal.SIGKILL)
            time.sleep(60)
        folder = marks / f"rank{train.world_rank()}"
        folder.mkdir(exist_ok=True)
        (folder / "epoch.txt").write_text(str(epoch))
        checkpoint = Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"mine": epoch})  # Tune's own metadata are in the same file
        train.report({"epoch": epoch, "start": start}, checkpoint=checkpoint)
        while epoch == 2 and not (marks / "stored").exists():  # until Tune has this epoch's checkpoint
            time.sleep(0.05)


class TrialRecorder(tune.Callback):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.epochs: list[int] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        self.epochs.append(result["epoch"])

    def on_checkpoint(self, iteration: int, trials: Any, trial: Any, checkpoint: Any, **info: Any) -> None:
        if trial.last_result["epoch"] == 2:
            (self.marks / "stored").touch()


@pytest.mark.nightly
@pytest.mark.elastic
def test_a_trial_survives_a_worker_failure_and_a_killed_trial_is_restarted(ray_cluster: None, tmp_path: Path) -> None:
    recorder = TrialRecorder(tmp_path)
    (result,) = tune.Tuner(
        RecordsProcess(
            failing_twice, train_loop_config={"marks": str(tmp_path)}, scaling_config=ScalingConfig(num_workers=2)
        ),
        param_space={},
        run_config=run_config(
            tmp_path / "runs", callbacks=[recorder], failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.error is None
    assert (tmp_path / "worker").exists() and (tmp_path / "trial_killed").exists()
    assert (result.metrics["epoch"], result.metrics["start"]) == (4, 3), "the trial resumed from its checkpoint"
    assert recorder.epochs[-2:] == [3, 4]
    assert sorted({*recorder.epochs} - {1}) == [0, 2, 3, 4]
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "epoch.txt").read_text() == "4"
    assert result.checkpoint.get_metadata()["_current_checkpoint_id"] == 4, "the numbers continue"
    assert Checkpoint(result.checkpoint.path).get_metadata()["mine"] == 4
    wait_for_free_cpus()


@pytest.mark.nightly
def test_an_experiment_of_a_trainable_can_be_restored(ray_cluster: None, tmp_path: Path) -> None:
    """The function fails in its first epoch, and the restored experiment resumes the trial from its checkpoint."""
    trainable = Trainer("none", num_workers=1, logdir=tmp_path / "logs").to_tune_trainable(failing_first)
    assert issubclass(trainable, tune.Trainable)
    space = {"rate": 2, "epochs": 3}
    failed = tune.Tuner(trainable, param_space=space, run_config=run_config(tmp_path / "runs", name="it")).fit()
    assert "the disk is full" in str(failed.errors[0])
    restored = tune.Tuner.restore(str(tmp_path / "runs" / "it"), trainable=trainable, resume_errored=True)
    (result,) = restored.fit()
    assert result.error is None
    assert (result.metrics["start"], result.metrics["score"]) == (1, 6)
    wait_for_free_cpus()


def epochs_in_a_trainer(config: dict[str, Any]) -> None:
    """A function of the user's that Tune runs, with a Trainer in it. It fails once, after its second report."""

    def epochs() -> None:
        start = (train.load_checkpoint() or {"epoch": -1})["epoch"] + 1
        for epoch in range(start, 3):
            train.report({"epoch": epoch, "start": start}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))
            while not Path(config["folder"], f"reported_{epoch}").exists():  # the next checkpoint must not be there yet
                time.sleep(0.05)

    with Trainer("none", num_workers=1, logdir=config["folder"]) as trainer:
        for rows in trainer.run_iterator(epochs, checkpoint=tune.get_checkpoint()):
            raysgd.tune.report(rows[0], checkpoint=trainer.latest_checkpoint)
            Path(config["folder"], f"reported_{rows[0]['epoch']}").touch()
            if rows[0]["epoch"] == 1 and once(Path(config["folder"], "trainer_failed")):
                raise RuntimeError("the trainer's trial fails")


def epochs_with_saves(config: dict[str, Any]) -> None:
    """A function of Ray Train 1.x that Tune runs, with a Trainer in it. It passes on metrics only, and saves after Tune has
    each report. It fails once, after its third report."""

    def epochs() -> None:
        start = (train.load_checkpoint() or {"epoch": -1})["epoch"] + 1
        for epoch in range(start, 3):
            train.report(epoch=epoch, start=start)
            while not Path(config["folder"], f"saves_{start}_{epoch}").exists():
                time.sleep(0.05)
            train.save_checkpoint(epoch=epoch)

    with Trainer("none", num_workers=1, logdir=config["folder"]) as trainer:
        for rows in trainer.run_iterator(epochs, checkpoint=tune.get_checkpoint()):
            tune.report(rows[0])
            Path(config["folder"], f"saves_{rows[0]['start']}_{rows[0]['epoch']}").touch()
            if rows[0]["epoch"] == 2 and once(Path(config["folder"], "saves_failed")):
                raise RuntimeError("the trial with saves fails")


def epochs_in_a_session(config: dict[str, Any]) -> None:
    """A function of AIR that Tune runs itself. It fails once, after its second report."""
    from raysgd.air import session

    found = session.get_checkpoint()
    start = 0 if found is None else found.to_dict()["epoch"] + 1
    with pytest.raises(ConfigError, match="Tune takes checkpoints with reports only"):
        train.save_checkpoint(epoch=0)
    for epoch in range(start, 3):
        checkpoint = Checkpoint.from_dict({"epoch": epoch})
        session.report({"epoch": epoch, "start": start, "id": session.get_trial_id()}, checkpoint=checkpoint)
        if epoch == 1 and once(Path(config["folder"], "session_failed")):
            raise RuntimeError("the session's trial fails")


@pytest.mark.nightly
def test_checkpoints_of_a_users_function_reach_tune(ray_cluster: None, tmp_path: Path) -> None:
    """Each function fails once, and Tune restarts it from the checkpoint of its last report. A Trainer's checkpoints are
    added to reports that have none, and one that was saved after the last report is passed on, too."""
    functions = [epochs_in_a_trainer, epochs_in_a_session, epochs_with_saves]
    results = tune.Tuner(
        tune.with_resources(
            lambda config: functions[config["which"]](config), tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])
        ),
        param_space={"which": tune.grid_search([0, 1, 2]), "folder": str(tmp_path)},
        run_config=run_config(tmp_path / "runs", failure_config=tune.FailureConfig(max_failures=1)),
    ).fit()
    assert not results.errors
    assert {path.name for path in tmp_path.glob("*_failed")} == {"trainer_failed", "session_failed", "saves_failed"}
    for result in results:
        assert (result.metrics["epoch"], result.metrics["start"]) == (2, 2)
        with result.checkpoint.as_directory() as folder:
            assert Checkpoint(folder).to_dict()["epoch"] == 2
    _, session, saves = sorted(results, key=lambda result: result.config["which"])
    assert session.metrics["id"] == session.metrics["trial_id"]
    assert saves.checkpoint.get_metadata()["_current_checkpoint_id"] == 3, "the numbers continue after the restart"
    # Tune may lose the reports that it had not processed when the function failed.
    reports = list(saves.metrics_dataframe["epoch"])
    assert reports[-2:] == [2, 2], "the one after the restart, and its repetition with the last checkpoint"
    wait_for_free_cpus()


def test_reports_to_tune_check_their_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint must be a raysgd\.train\.Checkpoint, a dict or"):
        raysgd.tune.report({"a": 1}, checkpoint=3)


def failing_first(config: dict[str, Any]) -> None:
    """Save before each report, and fail in the first epoch if there was no checkpoint."""
    found = train.load_checkpoint()
    start = 0 if found is None else found["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        train.save_checkpoint(epoch=epoch)
        train.report(score=config["rate"] * (epoch + 1), start=start)
        if found is None:
            raise RuntimeError("the disk is full")


@pytest.mark.parametrize(
    ("scaling", "given", "bundles"),
    [
        (ScalingConfig(num_workers=2), {}, [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}]),
        (ScalingConfig(num_workers=(1, 3)), {}, [{"CPU": 1}] * 4),
        (ScalingConfig(num_workers=2), {"num_workers": 1}, [{"CPU": 1}] * 2),
        (
            ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 2, "TPU": 1}, trainer_resources={"CPU": 0.5}),
            {},
            [{"CPU": 0.5}, {"CPU": 2, "GPU": 1, "TPU": 1}],
        ),
    ],
)
def test_the_resources_of_a_trial(scaling: ScalingConfig, given: dict[str, Any], bundles: list[Any]) -> None:
    trainer = DataParallelTrainer(lambda: None, scaling_config=scaling)
    config = {"scaling_config": given} if given else {}
    for _ in range(2):
        wanted = trainer.as_trainable().default_resource_request(config)
        assert (wanted.bundles, wanted.strategy) == (bundles, "PACK")


def test_trials_have_the_trainers_resources() -> None:
    given = {"CPU": 2, "GPU": 2, "special": 1}
    trainable = Trainer("none", 2, True, given).to_tune_trainable(lambda config: None)
    assert trainable.default_resource_request({}).bundles == [{"CPU": 1}, given, given]
    assert given == {"CPU": 2, "GPU": 2, "special": 1}


def test_param_space_is_merged_and_checked() -> None:
    trainer = DataParallelTrainer(lambda config: None, train_loop_config={"a": 1, "b": 2})
    with pytest.raises(ConfigError, match="param_space names 'lr'"):
        trainer._with({"lr": 1})
    assert trainer._with({"train_loop_config": {"b": 3}}).train_loop_config == {"a": 1, "b": 3}
    assert trainer.train_loop_config == {"a": 1, "b": 2}
    assert pickle.loads(pickle.dumps(trainer._with({"metadata": {"a": 1}}).metadata)) == {"a": 1}


def test_to_tune_trainable_is_refused(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer("none", num_workers=1) as trainer, pytest.raises(RuntimeError, match="do not start it"):
        trainer.to_tune_trainable(lambda config: None)
    with pytest.raises(ValueError, match="takes 2"):
        Trainer("none").to_tune_trainable(lambda a, b: None)
    for name in [name for name in sys.modules if name.startswith(("raysgd.tune", "raysgd.train.run.trials"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(raysgd, "tune", raising=False)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ImportError, match=r"raysgd\[tune\]"):
        Trainer("none").to_tune_trainable(lambda config: None)

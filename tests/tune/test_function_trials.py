"""Training functions as Tune trials: settings, placement, checkpoints, losses of workers and of whole trials."""

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

from raysgd import ConfigError, train
from raysgd.train import Checkpoint, DataParallelTrainer, ScalingConfig, TorchTrainer, Trainer

tune = pytest.importorskip("ray.tune", reason="needs Ray Tune (raysgd[tune])")


def once(mark: Path) -> bool:
    """True for the first process that asks."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def run_config(folder: Path, **more: Any) -> Any:
    return tune.RunConfig(storage_path=str(folder), verbose=0, **more)


def all_is_free() -> None:
    """Nothing of any trial holds a CPU any more; Ray hears of that a little later."""
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


def test_tune_takes_a_trainer(ray_cluster: None, tmp_path: Path) -> None:
    """Ray's own Tuner, with the trainer as it is. The trial overrides one setting of the loop, and leaves the others; it is
    stopped long before the loop's end."""
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
    assert best.metrics["bundles"] == [{"CPU": 1}, {"CPU": 1.5}, {"CPU": 1.5}], "workers are in the trial's own bundles"
    with best.checkpoint.as_directory() as folder:
        assert {"epoch": 2, "rate": 3}.items() <= Checkpoint(Path(folder) / "checkpoint.pkl").to_dict().items()
    going_on = DataParallelTrainer(learn, resume_from_checkpoint=best.checkpoint)
    newest = going_on.job().manager(tmp_path).latest
    assert newest is not None and newest.to_dict()["epoch"] == 2, "a trial's checkpoint can be trained on from"
    assert len(best.best_checkpoints) == 3, "each report's checkpoint is Tune's to keep"
    all_is_free()


class Told(DataParallelTrainer):
    """Writes down which process its trial is."""

    def setup(self) -> None:
        folder = Path((self.train_loop_config or {})["marks"])
        (folder / "trial").write_text(str(os.getpid()))


def troubled(config: dict[str, Any]) -> None:
    """Rank 1 dies in epoch 1, the whole trial in epoch 3. Checkpoints are directories."""
    marks = Path(config["marks"])
    found = train.get_checkpoint()
    start = 0
    if found is not None:
        with found.as_directory() as folder:
            start = int((Path(folder) / "checkpoint.pkl").read_text()) + 1
    for epoch in range(start, 5):
        if epoch == 1 and train.world_rank() == 1 and once(marks / "worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 3 and train.world_rank() == 0 and (marks / "seen").exists() and once(marks / "whole"):
            os.kill(int((marks / "trial").read_text()), signal.SIGKILL)
            time.sleep(60)
        folder = marks / f"rank{train.world_rank()}"
        folder.mkdir(exist_ok=True)
        (folder / "checkpoint.pkl").write_text(str(epoch))  # named as ours is for a dictionary
        checkpoint = Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"mine": epoch})  # Tune's own metadata go into the same file
        train.report({"epoch": epoch, "start": start}, checkpoint=checkpoint)
        while epoch == 2 and not (marks / "seen").exists():  # Tune has this epoch's checkpoint
            time.sleep(0.05)


class Seeing(tune.Callback):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.epochs: list[int] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        self.epochs.append(result["epoch"])

    def on_checkpoint(self, iteration: int, trials: Any, trial: Any, checkpoint: Any, **info: Any) -> None:
        if trial.last_result["epoch"] == 2:
            (self.marks / "seen").touch()


@pytest.mark.elastic
def test_a_lost_worker_is_the_trials_business_and_a_killed_trial_comes_back(ray_cluster: None, tmp_path: Path) -> None:
    seeing = Seeing(tmp_path)
    (result,) = tune.Tuner(
        Told(troubled, train_loop_config={"marks": str(tmp_path)}, scaling_config=ScalingConfig(num_workers=2)),
        param_space={},
        run_config=run_config(tmp_path / "runs", callbacks=[seeing], failure_config=tune.FailureConfig(max_failures=1)),
    ).fit()
    assert result.error is None
    assert (tmp_path / "worker").exists() and (tmp_path / "whole").exists()
    assert (result.metrics["epoch"], result.metrics["start"]) == (4, 3), "the trial went on from its checkpoint"
    assert seeing.epochs[-2:] == [3, 4]
    assert sorted(set(seeing.epochs)) == [0, 1, 2, 3, 4]
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "checkpoint.pkl").read_text() == "4"
    assert result.checkpoint.get_metadata()["_current_checkpoint_id"] == 4, "numbers went on"
    assert Checkpoint(result.checkpoint.path).get_metadata()["mine"] == 4
    all_is_free()


def test_a_trainer_becomes_a_trainable_and_an_experiment_is_restored(ray_cluster: None, tmp_path: Path) -> None:
    """The function fails in its first epoch; Tune is told to try the trial again, from its checkpoint."""
    trainable = Trainer("none", num_workers=1, logdir=tmp_path / "logs").to_tune_trainable(failing_first)
    assert issubclass(trainable, tune.Trainable)
    space = {"rate": 2, "epochs": 3}
    failed = tune.Tuner(trainable, param_space=space, run_config=run_config(tmp_path / "runs", name="it")).fit()
    assert "the disk is full" in str(failed.errors[0])
    restored = tune.Tuner.restore(str(tmp_path / "runs" / "it"), trainable=trainable, resume_errored=True)
    (result,) = restored.fit()
    assert result.error is None
    assert (result.metrics["start"], result.metrics["score"]) == (1, 6)
    all_is_free()


def failing_first(config: dict[str, Any]) -> None:
    """Saves before it reports, and fails in the first epoch if nothing was saved before."""
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
def test_what_a_trial_asks_for(scaling: ScalingConfig, given: dict[str, Any], bundles: list[Any]) -> None:
    trainer = DataParallelTrainer(lambda: None, scaling_config=scaling)
    config = {"scaling_config": given} if given else {}
    for _ in range(2):
        wanted = trainer.as_trainable().default_resource_request(config)
        assert (wanted.bundles, wanted.strategy) == (bundles, "PACK")


def test_the_overrides_of_a_trainer_reach_its_trials() -> None:
    given = {"CPU": 2, "GPU": 2, "special": 1}
    trainable = Trainer("none", 2, True, given).to_tune_trainable(lambda config: None)
    assert trainable.default_resource_request({}).bundles == [{"CPU": 1}, given, given]
    assert given == {"CPU": 2, "GPU": 2, "special": 1}


def test_a_trial_names_what_it_does_not_know() -> None:
    trainer = DataParallelTrainer(lambda config: None, train_loop_config={"a": 1, "b": 2})
    with pytest.raises(ConfigError, match="param_space names 'lr'"):
        trainer._with({"lr": 1})
    assert trainer._with({"train_loop_config": {"b": 3}}).train_loop_config == {"a": 1, "b": 3}
    assert trainer.train_loop_config == {"a": 1, "b": 2}
    assert pickle.loads(pickle.dumps(trainer._with({"metadata": {"a": 1}}).metadata)) == {"a": 1}


def test_a_trainable_of_a_trainer(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer("none", num_workers=1) as trainer, pytest.raises(RuntimeError, match="do not start it"):
        trainer.to_tune_trainable(lambda config: None)
    with pytest.raises(ValueError, match="takes 2"):
        Trainer("none").to_tune_trainable(lambda a, b: None)
    for name in [name for name in sys.modules if name.startswith("raysgd.tune")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ValueError, match=r"raysgd\[tune\]"):
        Trainer("none").to_tune_trainable(lambda config: None)

"""The settings of `fit()`: which are refused, and what they mean for the engine. The files of a run."""

import functools
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ConfigError, ElasticConfig, train
from raysgd.callbacks import PrintCallback
from raysgd.storage.remote import Uri
from raysgd.train import FailureConfig, RunConfig, ScalingConfig
from raysgd.train.fit.records import RunRecord, StoredRun, choose_log_dir
from raysgd.train.run.job import check_function
from raysgd.train.run.worker_group import limits_for
from raysgd.train.settings import check_strategy
from tests import storing
from tests.peek import record_run, settings_of


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"num_workers": count}, "num_workers") for count in (0, True, (3, 2), (1, 2, 3), "2")),
        ({"use_gpu": 1}, "use_gpu"),
        ({"resources_per_worker": {"GPU": 1}}, "use_gpu is False"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "use_gpu is True"),
        ({"resources_per_worker": {"CPU": -1}}, "CPU"),
        ({"resources_per_worker": 2}, "resources_per_worker"),
        ({"placement_strategy": "RANDOM"}, "placement_strategy"),
        ({"elastic": 3}, "elastic"),
        ({"trainer_resources": {"CPU": -1}}, "CPU"),
    ],
)
def test_invalid_scaling_configs_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScalingConfig(**wrong)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FailureConfig, {"max_failures": -2}),
        (FailureConfig, {"max_failures": True}),
        (RunConfig, {"name": "a/b"}),
        (RunConfig, {"storage_path": 5}),
        (RunConfig, {"failure_config": 3}),
        (RunConfig, {"checkpoint_config": {}}),
    ],
)
def test_invalid_configs_of_runs_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_loop_per_worker": 5}, "must be a function"),
        ({"train_loop_per_worker": lambda a, b: None}, "takes 2"),
        ({"train_loop_per_worker": lambda **names: None}, r"requires \*\*names by name"),
        ({"train_loop_per_worker": lambda *, lr: None}, "requires lr by name"),
        ({"train_loop_config": 5}, "config must be a dict"),
        ({"scaling_config": {"num_workers": 2}}, "scaling_config must be a raysgd.train.ScalingConfig"),
        ({"run_config": 1}, "run_config must be a raysgd.train.RunConfig"),
        ({"datasets": [1]}, "datasets must be a dict"),
        ({"metadata": {"a": object()}}, "metadata must be plain JSON"),
        ({"metadata": 3}, "metadata must be a dict"),
        ({"resume_from_checkpoint": 3}, "resume_from_checkpoint must be"),
        ({"backend_config": "gloo"}, "backend must be one of"),
    ],
)
def test_invalid_arguments_of_a_trainer_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train.DataParallelTrainer(**{"train_loop_per_worker": lambda: None, **wrong})


def test_rays_own_settings_are_refused_with_a_hint() -> None:
    air = pytest.importorskip("ray.tune")
    hint = r"This is Ray's own class.*from raysgd.train import "
    with pytest.raises(ConfigError, match=f"run_config must be a raysgd.train.RunConfig, got .*{hint}RunConfig"):
        train.DataParallelTrainer(lambda: None, run_config=air.RunConfig(name="a"))
    with pytest.raises(ConfigError, match=f"{hint}FailureConfig"):
        RunConfig(failure_config=air.FailureConfig(max_failures=1))
    with pytest.raises(ConfigError, match=f"{hint}CheckpointConfig"):
        check_strategy(air.CheckpointConfig(num_to_keep=1))
    with pytest.raises(ConfigError) as raised:
        RunConfig(failure_config=3)  # type: ignore[arg-type]
    assert "Ray" not in str(raised.value)


def test_the_limit_for_the_start_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_for().start_s == 100
    monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "7")
    assert limits_for().start_s == 7
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "300")
    assert limits_for().start_s == 300
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "soon")
    with pytest.raises(ConfigError, match="TRAIN_PLACEMENT_GROUP_TIMEOUT_S is 'soon'"):
        limits_for()


def test_names_may_be_bound() -> None:
    function, arguments = check_function(functools.partial(lambda config, lr: (config, lr), lr=0.1), {"epochs": 1})
    assert function(*arguments) == ({"epochs": 1}, 0.1)


@pytest.mark.parametrize(
    ("scaling", "most", "least", "min_workers"),
    [
        (ScalingConfig(num_workers=(2, 4)), 4, 2, 2),
        (ScalingConfig(num_workers=[2, 4]), 4, 2, 2),  # type: ignore[arg-type]
        (ScalingConfig(num_workers=4, elastic=ElasticConfig(min_workers=3)), 4, None, 3),
        (ScalingConfig(num_workers=(2, 4), elastic=ElasticConfig(min_workers=3)), 4, 2, 2),
    ],
)
def test_numbers_of_workers(scaling: ScalingConfig, most: int, least: int | None, min_workers: int) -> None:
    assert (scaling.most, scaling.least, scaling.policy().min_workers) == (most, least, min_workers)
    assert len(scaling.bundles()) == most + 1


@pytest.mark.parametrize("name", ["torch_config", "torch_backend"])
def test_backend_arguments_have_older_names(name: str) -> None:
    config = train.TorchConfig(backend="gloo", timeout_s=60)
    assert train.TorchTrainer(lambda: None, **{name: config}).backend_config is config
    with pytest.raises(ConfigError, match=f"{name} must be a raysgd.train.TorchConfig"):
        train.TorchTrainer(lambda: None, **{name: train.BackendConfig()})
    with pytest.raises(ConfigError, match="torch_config and torch_backend are names of one"):
        train.TorchTrainer(lambda: None, torch_config=config, torch_backend=config)


def test_get_dataset_config_returns_a_copy() -> None:
    class Own(train.DataParallelTrainer):
        _dataset_config = {"train": [1]}  # noqa: RUF012

    trainer = Own(lambda: None)
    trainer.get_dataset_config()["train"].append(2)
    assert trainer.get_dataset_config() == {"train": [1]}
    assert train.DataParallelTrainer(lambda: None).get_dataset_config() == train.DataConfig()


@pytest.mark.parametrize(
    ("given", "message"), [({"num_workers": 3}, "no argument 'num_workers'"), ({}, r"pass datasets= with \['train'\]")]
)
def test_invalid_arguments_of_restore_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    trainer = train.DataParallelTrainer(lambda: None, datasets={"train": [1, 2]})
    record_run(tmp_path, settings_of(trainer))
    with pytest.raises(ConfigError, match=message):
        train.DataParallelTrainer.restore(tmp_path, **given)
    found = train.DataParallelTrainer.restore(tmp_path, datasets={"train": [3]})
    assert found.datasets == {"train": [3]}


def test_restoring_needs_a_run(tmp_path: Path) -> None:
    assert not train.DataParallelTrainer.can_restore(tmp_path)
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        train.DataParallelTrainer.restore(tmp_path)


def test_the_files_of_a_run_can_be_read_while_it_is_running(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    record = RunRecord(tmp_path, tmp_path, "T", {"lr": 1}, None)
    record.begin({"a": b"b"})
    record.add({"loss": torch.tensor(0.5), "many": torch.ones(2), "nothing": float("nan")}, -1)
    record.add({"loss": 0.25}, 0)
    record.add({"loss": 0.125}, 0)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"metrics": {"lo')
    past = StoredRun.read(tmp_path)
    assert (past.status, past.settings) == ("running", {"a": b"b"})
    assert [row["loss"] for row in past.rows] == [0.5, 0.25, 0.125]
    assert past.rows[0]["many"] == "tensor([1., 1.])"
    assert past.metrics_by_checkpoint()[0]["loss"] == 0.25, "the metrics that were reported with the checkpoint"
    resumed = RunRecord(tmp_path, tmp_path, "T", {}, past)
    resumed.begin({})
    resumed.add({"loss": 0.0}, 1)
    resumed.end(RuntimeError("full"))
    past = StoredRun.read(tmp_path)
    assert [row["training_iteration"] for row in past.rows] == [1, 2, 3, 4], "the incomplete line was removed"
    assert (past.status, past.error) == ("failed", "RuntimeError: full")


def test_a_resumed_run_keeps_its_ids_and_its_total_time(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, tmp_path, "T", {}, None)
    record.begin({})
    record.add({"confusion": {(0, 1): {2: [{(3, 4): 5}]}}}, -1)
    record.rows[-1]["time_total_s"] = 100.0
    record.end(None)
    assert StoredRun.read(tmp_path).rows[-1]["confusion"] == {"(0, 1)": {"2": [{"(3, 4)": 5}]}}
    row = {"metrics": record.rows[-1] | {"confusion": 0}, "checkpoint": None}
    (tmp_path / "results.jsonl").write_bytes(storing.sealed_json(row) + b"\n")
    past = StoredRun.read(tmp_path)
    again = RunRecord(tmp_path, tmp_path, "T", {}, past)
    again.begin({})
    assert len(StoredRun.read(tmp_path).rows) == 1, "the rows are kept before the first new report"
    again.add({}, -1)
    again.end(None)
    first, second = StoredRun.read(tmp_path).rows
    assert (first["done"], second["done"]) == (False, True)
    assert second["time_total_s"] >= 100 > second["time_since_restore"]
    assert all(first[name] == second[name] for name in ("trial_id", "experiment_id"))


def test_rows_are_rewritten_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(tmp_path, tmp_path, "T", {}, None)
    record.begin({})
    record.add({"epoch": 1}, -1)
    resumed = RunRecord(tmp_path, tmp_path, "T", {}, StoredRun.read(tmp_path))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed.begin({})
    assert [row["epoch"] for row in StoredRun.read(tmp_path).rows] == [1]


class Planted:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_reading_a_run_runs_no_code_from_it(tmp_path: Path) -> None:
    RunRecord(tmp_path, tmp_path, "T", {}, None).begin({"a": pickle.dumps(Planted())})
    (tmp_path / "checkpoint_000000").write_bytes(pickle.dumps({"a": Planted()}))
    result = train.Result.from_path(tmp_path)
    assert result.checkpoint is not None and result.checkpoint.path == str(tmp_path / "checkpoint_000000")
    for checkpoint in (result.checkpoint, result.best_checkpoints[0][0]):
        with pytest.raises(CheckpointError, match="can run code"):
            checkpoint.to_dict()
    (tmp_path / "trainer.zip").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointError, match=r"trainer\.zip"):
        train.Result.from_path(tmp_path)


def test_a_new_run_config_keeps_the_settings_that_it_does_not_set(tmp_path: Path) -> None:
    keep, failures = train.CheckpointConfig(num_to_keep=1), FailureConfig(max_failures=7)
    first = train.DataParallelTrainer(
        lambda: None,
        run_config=RunConfig(checkpoint_config=keep, failure_config=failures),
    )
    record_run(tmp_path, settings_of(first))
    callbacks = [PrintCallback()]
    other = RunConfig(callbacks=callbacks, failure_config=FailureConfig(max_failures=1))
    found = train.DataParallelTrainer.restore(tmp_path, run_config=other).run_config
    assert (found.callbacks, found.checkpoint_config, found.max_failures) == (callbacks, keep, 1)


class Connected(train.DataParallelTrainer):
    def setup(self) -> None:
        self.lock = threading.Lock()


def test_attributes_that_setup_creates_are_not_stored(tmp_path: Path) -> None:
    trainer = Connected(lambda: None, run_config=RunConfig(storage_path=tmp_path, callbacks=5))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ConfigError, match="callbacks must be a list"):
            trainer.fit()
    assert "lock" in vars(trainer) and "lock" not in settings_of(trainer)
    assert not list(tmp_path.iterdir()), "refused callbacks leave no directory"


def test_a_setting_that_functions_refuse_leaves_no_directory(tmp_path: Path) -> None:
    scaling = ScalingConfig(elastic=ElasticConfig(shares="speed"))
    trainer = train.DataParallelTrainer(
        lambda: None, scaling_config=scaling, run_config=RunConfig(storage_path=tmp_path)
    )
    with pytest.raises(ConfigError, match="for TorchTrainer, which divides a batch into parts"):
        trainer.fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "wrong", "hint"),
    [
        (RunConfig, "verbose", "PrintCallback"),
        (RunConfig, "stop", "return from it"),
        (RunConfig, "local_dir", "did you mean 'storage_path'"),
        (RunConfig, "orphan_s", "resume from the newest one"),
        (train.CheckpointConfig, "checkpoint_frequency", "the training function reports"),
        (train.CheckpointStrategy, "checkpoint_at_end", "the training function reports"),
        (ScalingConfig, "accelerator_type", "resources_per_worker"),
        (FailureConfig, "fail_fast", "always ends the run"),
        (FailureConfig, "max_failure", "did you mean 'max_failures'"),
    ],
)
def test_unknown_settings_are_refused_with_a_hint(kind: Any, wrong: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no argument '{wrong}': .*{hint}"):
        kind(**{wrong: 1})
    assert pickle.loads(pickle.dumps(kind())) == kind()


def test_a_run_in_remote_storage_has_its_own_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / "ray_results"
    (home / "run").mkdir(parents=True)
    (home / "run" / "trainer.zip").write_bytes(b"a run that is stored here")
    assert choose_log_dir(Uri("s3://a/run")) == home / "run_2"
    assert choose_log_dir(Uri("s3://b/run")) == home / "run_3"
    assert choose_log_dir(Uri("s3://a/run"), resume=True) == home / "run_2"
    assert choose_log_dir(Uri("s3://c/run"), resume=True) == home / "run_4"
    assert [path.name for path in (home / "run").iterdir()] == ["trainer.zip"]


@pytest.mark.parametrize(
    ("made", "keeps"),
    [
        (lambda: train.CheckpointConfig(checkpoint_score_attribute="val_loss"), "highest"),
        (lambda: train.CheckpointStrategy(checkpoint_score_attribute="loss"), "highest"),
        (lambda: train.CheckpointConfig(checkpoint_score_attribute="acc", checkpoint_score_order="min"), "lowest"),
        (lambda: train.CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"), None),
        (lambda: train.CheckpointConfig(checkpoint_score_attribute="accuracy"), None),
        (lambda: train.CheckpointConfig(checkpoint_score_attribute="neg_log_loss"), None),
        (train.CheckpointConfig, None),
    ],
)
def test_an_order_that_keeps_the_worst_checkpoint_is_named(made: Any, keeps: str | None, caplog: Any) -> None:
    made()
    assert [
        f"keeps the checkpoint with the {keeps} value: pass checkpoint_score_order='" in each
        for each in caplog.messages
    ] == [True] * (keeps is not None)


def test_the_best_checkpoint_of_a_result_is_the_newest_of_equals_and_never_one_without_a_number() -> None:
    losses: list[dict[str, Any]] = [{"loss": 2.0}, {"loss": 1.0}, {}, {"loss": float("nan")}, {"loss": 1.0}]
    stored = [(train.Checkpoint.from_dict({"number": number}), each) for number, each in enumerate(losses)]
    result = train.Result(best_checkpoints=stored)
    best = {mode: result.get_best_checkpoint("loss", mode) for mode in ("min", "max")}  # type: ignore[arg-type]
    assert {mode: each and each.to_dict()["number"] for mode, each in best.items()} == {"min": 4, "max": 0}
    assert result.get_best_checkpoint("accuracy", "max") is None

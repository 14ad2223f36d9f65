"""Modules, names and orders of arguments of Ray Train 1.x and AIR, as their users import and call them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd import CheckpointError
from raysgd.train import Checkpoint, CheckpointStrategy, DataParallelTrainer, RunConfig, TorchConfig, Trainer
from raysgd.train.run.trainer import in_order
from tests.peek import record_run, settings_of

WITHOUT_EFFECT = {
    "constants": "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV TRAIN_ENABLE_WORKER_SPREAD_ENV TUNE_CHECKPOINT_FILE_NAME",
    "checkpoint": "TuneCheckpointManager",
    "trainer": "BACKEND_NAME_TO_CONFIG_CLS_NAME",
    "utils": "RayDataset",
}


def test_a_name_without_effect_warns_when_it_is_imported() -> None:
    for module, name in [(module, name) for module, names in WITHOUT_EFFECT.items() for name in names.split()]:
        found: dict[str, Any] = {}
        with pytest.warns(UserWarning, match=f"{name} of Ray Train 1.x has no effect in raysgd: .{{20}}") as caught:
            exec(f"from raysgd.train.{module} import {name}", found)
        assert len(caught) == 1 and found[name] is not None


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "arguments", "added"),
    [
        ("Average", {"keys": ["loss", "unknown"]}, {"avg(loss)": 1.5}),
        ("Average", {}, {"avg(loss)": 1.5, "avg(rows)": 4.0}),
        ("Max", {"keys": ["loss"]}, {"max(loss)": 2.0}),
        ("WeightedAverage", {"keys": ["loss"], "weight_key": "rows"}, {"weight_avg_rows(loss)": 1.25}),
        ("WeightedAverage", {"keys": ["loss"], "weight_key": "name"}, {"weight_avg_name(loss)": 1.5}),
        ("WeightedAverage", {"keys": ["loss"]}, {"weight_avg_None(loss)": 1.5}),
        ("WeightedAverage", {"keys": ["loss"], "weight_key": "zero"}, {"weight_avg_zero(loss)": 0.0}),
        ("Average", {"keys": ["tensor", "half"]}, {}),
        ("Average", {"keys": ["nan"]}, {"avg(nan)": NAN}),
        ("Max", {"keys": ["nan"]}, {"max(nan)": NAN}),
        ("WeightedAverage", {"keys": ["nan"], "weight_key": "rows"}, {"weight_avg_rows(nan)": 0.0}),
    ],
)
def test_results_preprocessors_add_numbers_of_all_workers(kind: str, arguments: Any, added: Any) -> None:
    """With the keys and the values of Ray 1.13, which leaves out NaN and values that are not numbers."""
    module = importlib.import_module("raysgd.train.callbacks.results_preprocessors")
    rows: list[dict[str, Any]] = [{"loss": 1.0, "rows": 6}, {"loss": 2.0, "rows": 2}, {"loss": NAN, "name": "c"}]
    if "keys" in arguments:
        own = {"zero": 0, "nan": NAN, "tensor": torch.ones(1), "half": np.float16(1.0)}
        rows = [{**row, **own} for row in rows]
    changed = getattr(module, f"{kind}ResultsPreprocessor")(**arguments).preprocess(rows)
    new = [{key: row[key] for key in row.keys() - rows[0].keys() - {"name"}} for row in changed]
    assert new == [pytest.approx(added, nan_ok=True)] * 3


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("Average", {"keys": ["loss", "other"]}, ["other"]),
        ("Max", {}, ["name"]),
        ("WeightedAverage", {"keys": ["loss", "name"], "weight_key": "rows"}, ["rows", "name"]),
        ("WeightedAverage", {"keys": ["loss"], "weight_key": "name"}, ["name"]),
        ("WeightedAverage", {"keys": ["loss"]}, [None]),
        ("Average", {"keys": ["loss"]}, []),
    ],
)
def test_results_preprocessors_name_what_no_worker_reports_as_a_number_once(
    kind: str, arguments: Any, named: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    module = importlib.import_module("raysgd.train.callbacks.results_preprocessors")
    made = getattr(module, f"{kind}ResultsPreprocessor")(**arguments)
    for _ in range(2):
        made.preprocess([{"loss": 1.0, "name": "a"}, {"loss": 2.0}])
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == named


def test_results_preprocessors_select_and_follow_each_other() -> None:
    from raysgd.train.callbacks import results_preprocessors as module  # type: ignore[attr-defined]

    rows = [{"loss": 1, "rank": 0}, {"loss": 2, "rank": 1}]
    excluded, one = module.ExcludedKeysResultsPreprocessor(["rank"]), module.IndexedResultsPreprocessor(1)
    assert module.IndexedResultsPreprocessor([0]).preprocess(rows) == rows[:1]
    assert module.SequentialResultsPreprocessor([excluded, one]).preprocess(rows) == [{"loss": 2}]


def test_what_is_refused_is_not_offered() -> None:
    """A star, and tools that list a module, get only what an import finds."""
    for module in ("utils", "data", "train", "train.session", "torch.worker_group", ""):
        found = importlib.import_module(f"raysgd.{module}".rstrip("."))
        assert not {"TimerStat", "Dataset", "SyncConfig", "Session", "PyTorchTrainer"} & set(dir(found)), module
        exec(f"from {found.__name__} import *")


def test_amp_is_that_of_torch() -> None:
    from raysgd.torch.training_operator import amp  # type: ignore[import-not-found]

    assert callable(amp.autocast) and callable(amp.GradScaler)


def test_old_modules_can_be_imported_in_every_way() -> None:
    """Before anything else is imported, and classes can be pickled by their old paths."""
    code = """
import raysgd.train.backend
from raysgd.train.callbacks.logging import JsonLoggerCallback
from raysgd.train.backends import torch as backend_module
from raysgd.utils import *
import importlib.util, pickle, raysgd.air, raysgd.train.callbacks
assert JsonLoggerCallback is raysgd.train.callbacks.JsonLoggerCallback
assert pickle.loads(b"craysgd.train.backends.torch\\nTorchConfig\\n.") is backend_module.TorchConfig
assert raysgd.air.session.report is raysgd.train.session.report and BATCH_SIZE == "*batch_size"
assert importlib.util.find_spec("raysgd.train.backends.gloo") is None
try:
    import raysgd.train.backends.gloo
except ModuleNotFoundError as error:
    print(error)
try:
    from raysgd.train.backend import TorchConfig
except ImportError as error:
    print(error)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "No module named 'raysgd.train.backends.gloo'" in printed
    assert "cannot import name 'TorchConfig' from 'raysgd.train.backend'" in printed


class FakeDataset:
    def streaming_split(self) -> None: ...


DATASET, STRATEGY = FakeDataset(), CheckpointStrategy(num_to_keep=1)


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (({"epoch": 1}, STRATEGY, DATASET), ({"epoch": 1}, STRATEGY, DATASET)),
        (({}, None, None), ({}, None, None)),
        ((DATASET, None, None), (None, None, DATASET)),
        (({"train": DATASET}, {"epoch": 1}, STRATEGY), ({"epoch": 1}, STRATEGY, {"train": DATASET})),
        ((None, {"epoch": 1}, STRATEGY), ({"epoch": 1}, STRATEGY, None)),
        (({"train": DATASET, "epoch": 1}, None, None), ({"train": DATASET, "epoch": 1}, None, None)),
    ],
)
def test_the_order_of_arguments_of_ray_train_is_recognized(given: Any, understood: Any) -> None:
    assert in_order(*given) == understood


def test_a_run_in_the_order_of_ray_train(ray_cluster: None, tmp_path: Path) -> None:
    from raysgd import train

    def function() -> Any:
        found = train.load_checkpoint()
        train.save_checkpoint(epoch=3, loss=0.5)
        return found

    with Trainer("none", logdir=tmp_path / "logs") as trainer:
        assert trainer.run(function, {}, None, None, {"epoch": 2}, STRATEGY) == [{"epoch": 2}]
        assert trainer.best_checkpoint is not None
        assert trainer.best_checkpoint["epoch"] == 3
        assert trainer.load_checkpoint_from_path(str(trainer.best_checkpoint_path))["loss"] == 0.5
        assert trainer.create_logdir(tmp_path / "other") == tmp_path / "other" and (tmp_path / "other").is_dir()
        assert trainer.latest_run_dir is not None
        trainer.create_run_dir()
        assert trainer.latest_run_dir.is_dir()
    assert Trainer("none", logdir=tmp_path).best_checkpoint is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Trainer.load_checkpoint_from_path(str(tmp_path / "absent"))


def test_restore_takes_the_function_by_position(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> int:
        return int(config["value"])

    record_run(tmp_path, settings_of(DataParallelTrainer(loop, train_loop_config={"value": 1})))
    again = DataParallelTrainer.restore(tmp_path, lambda config: config["value"] * 10, {"value": 2})
    assert (again.train_loop_per_worker({"value": 2}), again.train_loop_config) == (20, {"value": 2})


def test_tuner_needs_its_own_run_config(tmp_path: Path) -> None:
    from ray import tune

    with pytest.raises(ValueError, match=r"run_config=ray\.tune\.RunConfig"):
        tune.Tuner(lambda config: None, run_config=RunConfig(name="run", storage_path=str(tmp_path)))
    changed = dataclasses.replace(RunConfig(name="a"), name="b")
    assert (changed.name, copy.deepcopy(changed).name) == ("b", "b")


def test_models_leave_distributed_data_parallel_in_checkpoints(tmp_path: Path) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from raysgd.train.backends import TorchHooks

    model = torch.nn.Linear(2, 1)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # its constructor needs a process group
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    found = TorchHooks.encode_data({"model": wrapped, "all": [wrapped]})
    assert found["model"] is model and found["all"][0] is model
    loaded = Checkpoint.from_bytes(Checkpoint.from_dict(found).to_bytes(), trusted=True).to_dict()["model"]
    assert torch.equal(loaded.weight, model.weight)


def test_tensors_are_arrays_for_tune() -> None:
    import numpy
    import torch

    from raysgd.train.in_trial import without_tensors

    found = without_tensors({"one": torch.tensor(0.5), "two": torch.ones(2, requires_grad=True), "in": [torch.ones(2)]})
    assert found["one"] == 0.5 and type(found["one"]) is float
    assert isinstance(found["two"], numpy.ndarray) and found["two"].tolist() == [1, 1]
    assert isinstance(found["in"][0], numpy.ndarray)


def test_functions_of_train_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    from raysgd.train import constants, utils

    assert utils.construct_path(Path("a"), Path("/b")) == Path("/b/a")
    assert utils.construct_path(Path("/a"), Path("/b")) == Path("/a")
    assert utils.construct_path(Path("~/a"), Path("/b")) == Path.home() / "a"
    assert importlib.import_module("raysgd.train.trainer").get_backend_config_cls("torch") is TorchConfig
    assert utils.construct_train_func(lambda config: config["a"], {"a": 1})() == 1
    with pytest.raises(ValueError, match="takes 2"):
        utils.construct_train_func(lambda a, b: None, None)
    address, port = utils.get_address_and_port()
    assert "." in address and 0 < port < 65536
    monkeypatch.setenv("RAYSGD_OLD", "")
    utils.update_env_vars({"RAYSGD_OLD": 1})
    import os

    assert os.environ["RAYSGD_OLD"] == "1"
    assert "_timestamp" in constants.ALL_RESERVED_KEYS


def test_the_name_of_the_machine_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not resolve, or have docker's address."""
    from raysgd.train.utils import get_address_and_port

    def unreachable(host: str) -> str:
        raise OSError(f"no route to {host}")

    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    for route, address in ((lambda host: "10.9.0.2", "10.9.0.2"), (unreachable, "127.0.0.1")):
        monkeypatch.setattr("raysgd.core.channel.network.address_towards", route)
        assert get_address_and_port()[0] == address

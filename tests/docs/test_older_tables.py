"""The tables of older names in the migration pages say what an import finds, and these take the older arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from raysgd import train

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("migrating_ray_train_v1.md", "migrating_ray_train.md")
ROW = re.compile(r"^\| `(ray[\w.]*)` \| ((?:`\w+` ?)+) \| (\w+) \|(.*)\|$", re.M)
OPTIONAL = {"tensorflow", "horovod"}


def rows(page: str) -> list[tuple[str, str, str, str]]:
    """Return (module, name, verdict, note) for each name of a page's table."""
    table = (DOCS / page).read_text(encoding="utf-8").partition("## Every public name")[2]
    found = [
        (module, name, verdict, note.strip())
        for module, names, verdict, note in ROW.findall(table)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert len(found) > 50 and table.count("\n| `ray") == len(ROW.findall(table)), "every row is read"
    return found


def here(module: str) -> str:
    return re.sub("^ray", "raysgd", module.replace("ray.util.sgd.v2", "ray.train"))


def resolved(path: str) -> Any:
    """Return a module, or what a module or one of its classes has under a name. Raise LookupError if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            return error  # a name that an optional package would provide
        if "." not in path or not str(error.name).startswith("raysgd"):
            raise LookupError(path) from error
    parent, _, name = path.rpartition(".")
    try:
        found = resolved(parent)
        return found if isinstance(found, ModuleNotFoundError) else getattr(found, name)
    except (AttributeError, ImportError) as error:
        raise LookupError(path) from error


def exists(path: str) -> bool:
    try:
        return resolved(path) is not None
    except LookupError:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_the_table_says_what_an_import_finds(page: str) -> None:
    found = rows(page)
    assert {verdict for _, _, verdict, _ in found} == {"works", "differs", "refused"}
    assert not [row for row in found if not row[3] and row[2] != "works"], "say how it differs, or why it is refused"
    wrong = [row for row in found if exists(f"{here(row[0])}.{row[1]}") == (row[2] == "refused")]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_a_refused_name_says_what_to_do_when_it_is_imported(page: str) -> None:
    for module, name in {(here(row[0]), row[1]) for row in rows(page) if row[2] == "refused"}:
        if not module.rpartition(".")[2].islower():
            continue  # a member of a class
        try:
            exec(f"from {module} import {name}")
        except ImportError as error:
            explains = str(error).startswith(f"raysgd has no {name}: ")
            assert explains or getattr(error, "name", "") in OPTIONAL, error
        else:
            raise AssertionError(f"{module}.{name} was imported")


@pytest.mark.parametrize("page", PAGES)
def test_no_name_is_twice_in_a_table(page: str) -> None:
    names = [(module, name) for module, name, *_ in rows(page)]
    assert sorted(set(names)) == sorted(names)


# The arguments of Ray Train 1.x and AIR, by what takes them.
ARGUMENTS = {
    "Trainer": "backend num_workers use_gpu resources_per_worker logdir max_retries",
    "Trainer.start": "initialization_hook train_cls args kwargs",
    "Trainer.run": "train_func config callbacks dataset checkpoint checkpoint_strategy",
    "Trainer.run_iterator": "train_func config dataset checkpoint checkpoint_strategy",
    "Trainer.to_tune_trainable": "train_func dataset",
    "TrainingIterator.get_final_results": "force",
    "BackendExecutor": "backend_config num_workers num_cpus_per_worker num_gpus_per_worker "
    "additional_resources_per_worker max_retries",
    "BackendExecutor.start": "initialization_hook train_cls train_cls_args train_cls_kwargs",
    "BackendExecutor.start_training": "train_func run_dir checkpoint checkpoint_strategy latest_checkpoint_id",
    "CheckpointStrategy": "num_to_keep checkpoint_score_attribute checkpoint_score_order",
    "CheckpointConfig": "num_to_keep checkpoint_score_attribute checkpoint_score_order",
    "FailureConfig": "max_failures",
    "RunConfig": "name callbacks failure_config checkpoint_config storage_path",
    "ScalingConfig": "num_workers use_gpu resources_per_worker trainer_resources placement_strategy",
    "WorkerGroup.shutdown": "patience_s",
    "TorchConfig": "backend init_method timeout_s",
    "HorovodConfig": "nics verbose key ssh_port ssh_identity_file ssh_str timeout_s placement_group_timeout_s",
    "DataParallelTrainer": "train_loop_per_worker train_loop_config backend_config scaling_config dataset_config "
    "run_config datasets metadata resume_from_checkpoint",
    "TorchTrainer": "train_loop_per_worker torch_config torch_backend",
    "TensorflowTrainer": "train_loop_per_worker tensorflow_config tensorflow_backend",
    "HorovodTrainer": "train_loop_per_worker horovod_config",
    "report": "metrics checkpoint",
    "torch.prepare_model": "model move_to_device wrap_ddp ddp_kwargs",
    "torch.prepare_data_loader": "data_loader add_dist_sampler move_to_device auto_transfer",
    "torch.accelerate": "amp",
    "torch.backward": "tensor",
    "torch.enable_reproducibility": "seed",
    "callbacks.JsonLoggerCallback": "logdir filename workers_to_log",
    "callbacks.TBXLoggerCallback": "logdir worker_to_log",
    "callbacks.MLflowLoggerCallback": "tracking_uri registry_uri experiment_id experiment_name tags save_artifact logdir "
    "worker_to_log",
    "callbacks.TorchTensorboardProfilerCallback": "logdir workers_to_log",
}


def test_arguments_have_their_names() -> None:
    found = {path: inspect.signature(resolved(f"raysgd.train.{path}")).parameters for path in ARGUMENTS}
    assert [(path, name) for path in ARGUMENTS for name in ARGUMENTS[path].split() if name not in found[path]] == []


def test_refused_calls_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="leave out placement_group"):
        train.WorkerGroup(1, placement_group=object())
    with pytest.raises(DeprecationWarning, match="Ray Data"):
        train.DataParallelTrainer(lambda: None).preprocess_datasets()

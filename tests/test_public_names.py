"""Public names can be imported, are unique, and those of RaySGD v1 are where they were."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import raysgd
from raysgd import constants
from raysgd.compat import MODULES as OLD_MODULES

# Optional packages, without which the tests pass.
OPTIONAL = {"tensorflow", "keras", "tf_keras", "horovod", "lightning", "torchmetrics", "pandas", "transformers", "peft"}
OPTIONAL |= {"timm", "tokenizers", "torchvision"}

V1_NAMES = {
    "raysgd": "TorchTrainer TFTrainer TrainingOperator",
    "raysgd.torch": "TorchTrainer TrainingOperator CreatorOperator BaseTorchTrainable",
    "raysgd.tf": "TFTrainer TFTrainable",
    "raysgd.data": "Dataset",
    "raysgd.utils": "BATCH_COUNT NUM_SAMPLES BATCH_SIZE AverageMeter AverageMeterCollection "
    "find_free_port check_for_failure override",
    "raysgd.torch.constants": "USE_FP16 NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH "
    "SCHEDULER_STEP_MANUAL VALID_SCHEDULER_STEP NCCL_TIMEOUT_S SGD_PLACEMENT_GROUP_TIMEOUT_S",
    "raysgd.torch.resnet": "ResNet18 ResNet34 ResNet50 ResNet101 ResNet152",
    "raysgd.torch.torch_trainer": "TorchTrainer BaseTorchTrainable",
    "raysgd.torch.utils": "setup_address setup_process_group",
    "raysgd.tf.tf_trainer": "TFTrainer TFTrainable",
    "raysgd.torch.training_operator": "TrainingOperator CreatorOperator get_test_operator get_test_metrics_operator",
}
CONSTANTS = {
    "raysgd.constants": {
        "NUM_SAMPLES": "num_samples",
        "BATCH_COUNT": "batch_count",
        "BATCH_SIZE": "*batch_size",
    },
    "raysgd.torch.constants": {
        "USE_FP16": "__use_fp16__",
        "NUM_STEPS": "__num_steps__",
        "SCHEDULER_STEP": "scheduler_step",
        "SCHEDULER_STEP_BATCH": "batch",
        "SCHEDULER_STEP_EPOCH": "epoch",
        "SCHEDULER_STEP_MANUAL": "manual",
        "VALID_SCHEDULER_STEP": {"batch", "epoch", "manual"},
    },
}
WALK = pkgutil.walk_packages(raysgd.__path__, "raysgd.", onerror=lambda _: None)
MODULES = sorted({module.name for module in WALK} | set(OLD_MODULES))


def missing_extra(error: ImportError) -> str:
    """Return the name of the optional package that an import error is about, or "" if it is about something else."""
    name = (getattr(error.__cause__, "name", None) or error.name or "").split(".")[0]
    return name if name in OPTIONAL else ""


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if missing := missing_extra(error):
            pytest.skip(f"{name} needs {missing}, which is not installed here")
        raise


def exists(module: ModuleType, name: str) -> bool:
    """Return whether a name exists. If its framework is not installed, the error must say which extra to install."""
    try:
        return hasattr(module, name)
    except ImportError as error:
        return bool(missing_extra(error)) and "raysgd[" in str(error)


@pytest.mark.parametrize("name", ["raysgd", *MODULES])
def test_names_in_all_exist(name: str) -> None:
    module = imported(name)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names)), f"{name}.__all__ has a name twice"
    absent = [public for public in names if not exists(module, public)]
    assert not absent, f"{name}.__all__ has names that do not exist: {absent}"
    assert set(names) <= set(dir(module)), "dir() must show what can be imported"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in V1_NAMES.items() for n in names.split()])
def test_v1_names(module: str, name: str) -> None:
    try:
        assert getattr(imported(module), name) is not None
    except ImportError as error:
        if not (missing := missing_extra(error)):
            raise
        pytest.skip(f"{module}.{name} needs {missing}, which is not installed here")


@pytest.mark.parametrize("module", CONSTANTS)
def test_v1_constants(module: str) -> None:
    found = {name: getattr(imported(module), name) for name in CONSTANTS[module]}
    assert found == CONSTANTS[module]


def test_packages_state_their_names() -> None:
    assert {"TorchTrainer", "TrainingOperator", "TrainingOptions"} <= set(raysgd.__all__)
    assert constants.BATCH_SIZE.startswith("*")


# RaySGD's and Ray Train's users import these names from more than one package.
DEFINED_TWICE = {"HorovodTrainer", "TorchTrainer", "TrainingOperator"}


def test_a_public_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    library = Path(raysgd.__file__).resolve().parent
    for path in sorted(library.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(library)))
    twice = {name: files for name, files in places.items() if len(files) > 1 and name not in DEFINED_TWICE}
    assert not twice, f"these class names are defined more than once: {twice}"

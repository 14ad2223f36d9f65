"""What is promised can be imported: `__all__` everywhere, and RaySGD v1's names where it had them."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import raysgd
from raysgd import constants

# Packages that a checkout may lack without being broken: they are extras.
OPTIONAL = {"tensorflow", "keras", "tf_keras", "horovod", "lightning", "torchmetrics", "pandas"}

V1_NAMES = {
    "raysgd": "TorchTrainer TFTrainer TrainingOperator",
    "raysgd.torch": "TorchTrainer TrainingOperator CreatorOperator BaseTorchTrainable",
    "raysgd.tf": "TFTrainer TFTrainable",
    "raysgd.data": "Dataset",
    "raysgd.utils": "BATCH_COUNT NUM_SAMPLES BATCH_SIZE TimerStat TimerCollection AverageMeter "
    "AverageMeterCollection find_free_port check_for_failure override",
    "raysgd.torch.constants": "USE_FP16 NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH "
    "SCHEDULER_STEP_MANUAL VALID_SCHEDULER_STEP NCCL_TIMEOUT_S SGD_PLACEMENT_GROUP_TIMEOUT_S",
    "raysgd.torch.resnet": "ResNet18 ResNet34 ResNet50 ResNet101 ResNet152",
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
MODULES = sorted(module.name for module in WALK)


def missing_extra(error: ImportError) -> str:
    """The absent optional package behind an import error, or nothing if it is about something else."""
    name = (getattr(error.__cause__, "name", None) or error.name or "").split(".")[0]
    return name if name in OPTIONAL else ""


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if missing := missing_extra(error):
            pytest.skip(f"{name} needs {missing}, which is not installed here")
        raise


def is_there(module: ModuleType, name: str) -> bool:
    """A name whose framework is absent counts as there if it says which extra to install."""
    try:
        return hasattr(module, name)
    except ImportError as error:
        return bool(missing_extra(error)) and "raysgd[" in str(error)


@pytest.mark.parametrize("name", ["raysgd", *MODULES])
def test_all_is_true(name: str) -> None:
    module = load(name)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names)), f"{name}.__all__ says a name twice"
    absent = [public for public in names if not is_there(module, public)]
    assert not absent, f"{name}.__all__ promises {absent}"
    assert set(names) <= set(dir(module)), "dir() must show what can be imported"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in V1_NAMES.items() for n in names.split()])
def test_v1_names(module: str, name: str) -> None:
    try:
        assert getattr(load(module), name) is not None
    except ImportError as error:
        if not (missing := missing_extra(error)):
            raise
        pytest.skip(f"{module}.{name} needs {missing}, which is not installed here")


@pytest.mark.parametrize("module", CONSTANTS)
def test_v1_constants(module: str) -> None:
    found = {name: getattr(load(module), name) for name in CONSTANTS[module]}
    assert found == CONSTANTS[module]


def test_packages_state_their_names() -> None:
    assert {"TorchTrainer", "TrainingOperator", "TrainingOptions"} <= set(raysgd.__all__)
    assert constants.BATCH_SIZE.startswith("*")

"""No ready-made operator, and none of the examples, changes what nobody saves: the log names nothing in its first step and call."""

import ast
import importlib.util
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer, TrainingOperator
from raysgd.constants import BATCH_SIZE
from tests.local.group import Cluster
from tests.operators.test_auto_batch import OPERATORS

READY = {
    **OPERATORS,
    "contrastive": ("raysgd.operators.contrastive", "ContrastiveOperator", {"batch_size": 4}),
    "gan": ("raysgd.operators.gan", "GANOperator", {"batch_size": 4}),
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIGS: dict[str, dict[str, Any]] = {
    "callbacks_mlflow_tensorboard": {"lr": 0.01},
    "custom_train_epoch": {"accumulate": 2},
    "dcgan": {BATCH_SIZE: 8, "rings": 16, "noise": 4, "width": 4, "lr": 1e-3},
    "gpt": {BATCH_SIZE: 8, "windows": 16, "validated": 4, "length": 8, "width": 8, "heads": 2, "layers": 1}
    | {"lr": 1e-3, "epochs": 1},
    "horovod_digits": {"lr": 0.003},
    "migrate_v1_after": {BATCH_SIZE: 40},
    "mixed_precision": {"points": 64, "batch_size": 16},
    "resnet": {"width": 4, BATCH_SIZE: 8, "side": 8, "lr": 0.1, "epochs": 1, "train": 16, "held_out": 8},
    "save_and_resume": {},
    "text_classifier": {"rows": 32, "batch": 16, "epochs": 1},
    "two_models": {"width": 8, "batch_size": 64},
}
# Those of TensorFlow and of RaySGD, and those whose data need Ray.
OTHERS = {"keras_digits_operator", "tf_custom_train_batch", "migrate_v1_before", "ray_data"}


def operator_in(name: str) -> type[TrainingOperator]:
    path = next(EXAMPLES.glob(f"**/{name}.py"))
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        pytest.skip(str(error))
    kinds = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == spec.name]
    (found,) = (each for each in kinds if issubclass(each, TrainingOperator))
    return found


def test_every_operator_of_the_examples_is_here() -> None:
    found = {
        path.stem
        for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("programs/*.py")]
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.ClassDef) and any("Operator" in ast.unparse(base) for base in each.bases)
    }
    assert found == CONFIGS.keys() | OTHERS


@pytest.mark.parametrize("name", [*READY, *CONFIGS])
def test_the_log_names_nothing_that_is_not_saved(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if name in READY:
        for needed in ("torchmetrics", "transformers", "peft"):
            pytest.importorskip(needed)
        module, kind, config = READY[name]
        operator = getattr(import_module(module), kind)
    else:
        operator, config = operator_in(name), CONFIGS[name]
    with (
        Cluster(),
        TorchTrainer(
            training_operator_cls=operator,
            config={**config, "pictures": str(tmp_path)},
            num_workers=2 if name in OPERATORS else 1,
            use_gpu=False,
            scheduler_step_freq="manual" if "epochs" in config or name == "migrate_v1_after" else None,
        ) as trainer,
    ):
        assert trainer.train(num_steps=2)["batch_count"] > 0
    assert not [each for each in caplog.messages if "new workers will not have" in each]

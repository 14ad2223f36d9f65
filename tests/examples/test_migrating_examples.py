"""Scripts as the users of RaySGD and Ray Train 1.x have them, which run here with only their imports changed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.background import Background
from tests.examples.test_examples import missing

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migrating"
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))
# The modules of `ray.util.sgd` in Ray 1.9.
RAYSGD = {
    "ray.util.sgd",
    *(f"ray.util.sgd.{name}" for name in ("torch", "tf", "data", "utils", "tf.tf_trainer")),
    *(f"ray.util.sgd.torch.{name}" for name in ("torch_trainer", "training_operator", "constants", "utils", "resnet")),
}
# Modules of `ray.train` in Ray 1.x.
RAY_TRAIN = {
    "ray.train",
    *(f"ray.train.{name}" for name in ("backends.torch", "checkpoint", "torch", "trainer")),
    *(f"ray.train.callbacks.{name}" for name in ("callback", "logging")),
}
# The end of what each prints; numbers that depend on the machine are left open.
PRINTED = {
    "train_example.py": r"val_loss (0\.0\d*|[\d.]+e-\d+)\ntrained weight: (2\.0|1\.9)\d+, bias: (5\.0|4\.9)\d+\n",
    "custom_batches.py": r"epoch 1 accuracy [\d.]+ samples 200\nepoch 1 accuracy [\d.]+ samples 200\n"
    r"note hello val_accuracy 0\.\d+\nsame True note none\nbatches_seen \[20(, 20)?\]\n",
    "function_example.py": r"starting\nepoch 0 (ranks .*)\nepoch 1 \1\nepoch 2 \1\nfinished, error: False\n"
    r"rounds in results.json: 3\nbest 2\nepoch 3 loss 0\.\d+\nepoch 4 loss 0\.0\d*\nstarted at \{3\}\n"
    r"trained weight: (2\.0|1\.9)\d+, bias: (5\.0|4\.9)\d+\n",
    "lightning_example.py": r"epoch 3 train_acc 0\.\d+ val_loss 0\.\d+ val_acc 0\.[89]\d+\nmodule LitClassifier( LitClassifier)?\n",
    "tf_example.py": r"train_loss [\d.]+ validation_loss ([\d.]+)\nrestored \1\nparameters 31\n",
    "tune_example.py": r"torch: best lr 0\.1\n(?s:.*)tf: TERMINATED validation_loss [\d.]+\n",
}


def run(background: Background, name: str, workers: int) -> str:
    if missing_of(name):
        return "not run"
    count = "--num-replicas" if name == "tf_example.py" else "--num-workers"
    arguments = [] if name == "tune_example.py" else [count, str(workers)]
    done = background.run(str(FOLDER / name), *arguments, connected=workers > 1 and name != "tune_example.py")
    assert done.returncode == 0, f"{name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def missing_of(name: str) -> list[str]:
    return missing(f"migrating/{name}")


@pytest.mark.parametrize("name", NAMES)
def test_only_imports_name_raysgd(name: str) -> None:
    """So the script was one for RaySGD or Ray Train, before `ray.util.sgd` or `ray` was replaced in its imports."""
    found = re.findall(r"^.*\braysgd\b.*$", (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
    modules = {re.fullmatch(r"(?:from|import) (raysgd[\w.]*) (?:import|as) .+", line) for line in found}
    assert found and None not in modules, found
    older = {"ray.util.sgd": RAYSGD, "ray": RAY_TRAIN}
    assert any({was + module[1].removeprefix("raysgd") for module in modules if module} <= older[was] for was in older)


@pytest.mark.script(run=run)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("custom_batches.py", 1),
        *(pytest.param(name, 2, marks=[pytest.mark.nightly, pytest.mark.slow]) for name in NAMES),
    ],
)
def test_it_runs(name: str, workers: int, outcome: Callable[[], str]) -> None:
    if lacking := missing_of(name):
        pytest.skip(f"without {', '.join(lacking)}")
    output = outcome()
    assert re.search(PRINTED[name] + r"\Z", output), output

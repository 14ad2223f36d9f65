"""Every example runs as a reader would run it, and what it prints is looked at. New ones are found."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.background import Background

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = "demo.py"  # a module of the library
# Scripts for Ray 1.x, and what they become: looked at below.
MIGRATED = {"migrate_v1_before.py", "migrate_v1_after.py"}
SCRIPTS = [DEMO, *sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in MIGRATED)]
# Those that start Ray: the first one that a reader runs, and those that say how.
ALONE = {DEMO, "ray_data.py", "tune_grid.py"}
TRAIN_SAMPLES = 1437


def path_of(name: str) -> Path:
    return EXAMPLES.parent / "raysgd" / name if name == DEMO else EXAMPLES / name


def run(background: Background, name: str) -> str:
    if missing(name):
        return "not run"
    command = ["-m", "raysgd.demo"] if name == DEMO else [str(path_of(name))]
    return printed(background, *command, connected=name not in ALONE)


def printed(background: Background, *command: str, connected: bool) -> str:
    done = background.run(*command, "--smoke", connected=connected)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def numbers(name: str, output: str) -> list[float]:
    """Every number that is printed right after this name."""
    return [float(value) for value in re.findall(rf"\b{name}\s+([\d.]+)", output)]


def loss_falls(output: str) -> None:
    losses = numbers("train_loss", output)
    assert len(losses) >= 2, output
    assert losses[-1] < 0.8 * losses[0], output


def demo(output: str) -> None:
    rows = [line.split() for line in output.splitlines() if re.match(r"\s+\d+\s+\d+\s", line)]
    assert [row[0] for row in rows] == ["1", "2", "3"], output
    assert all(int(row[1]) == TRAIN_SAMPLES for row in rows), output
    assert float(rows[-1][2]) < 0.8 * float(rows[0][2]), output
    assert float(rows[-1][4].rstrip("%")) > 85, output
    # A replacement may join before the epoch is over: that is a recovery too, of the kind "growth".
    assert re.search(r"recoveries: [12]\n  worker death in batch \d+, removed ranks \(1,\): 2 -> 1 workers", output)
    assert f"samples in that epoch: {TRAIN_SAMPLES} of {TRAIN_SAMPLES}" in output


def ray_data(output: str) -> None:
    loss_falls(output)
    assert set(numbers("rows", output)) == {400.0}, output
    assert "worker death: 2 -> 1 workers" in output


def linear_regression(output: str) -> None:
    loss_falls(output)
    assert numbers("val_r2", output)[-1] > 0.98, output
    made, learned = re.findall(r"y = ([\d.]+) x ([-+][\d.]+)", output)
    assert [float(part) for part in learned] == pytest.approx([float(part) for part in made], abs=0.05)


def two_models(output: str) -> None:
    before, after = numbers("distance", output)
    assert after < 0.85 * before, output
    assert len(numbers("loss_g", output)) == len(numbers("loss_d", output)) == 6, output


def custom_train_epoch(output: str) -> None:
    loss_falls(output)
    batches, steps = numbers("batches", output), numbers("steps", output)
    assert [count / 4 for count in batches] == steps, output


def from_creators(output: str) -> None:
    loss_falls(output)
    assert numbers("lr", output) == [0.1, 0.1, 0.05, 0.05]
    assert numbers("val_accuracy", output)[-1] > 0.85, output


def save_and_resume(output: str) -> None:
    loss_falls(output)
    saved, loaded, finished = numbers("val_loss", output)
    assert loaded == pytest.approx(saved, rel=1e-3)
    assert finished < saved
    assert numbers("epoch", output) == [1, 2], "the loaded trainer counts on"
    assert "{'times_loaded': 1}" in output


def callbacks_mlflow_tensorboard(output: str) -> None:
    _, mlflow, tensorboard = re.split(r"MLflow has|TensorBoard has", output)
    assert numbers("step", mlflow) == numbers("step", tensorboard) == [8, 16, 24]
    assert numbers("train_loss", mlflow) == numbers("train_loss", tensorboard)
    assert "status FINISHED, lr 0.01" in mlflow
    loss_falls(mlflow)


def function_torchmetrics(output: str) -> None:
    loss_falls(output)
    assert len(re.findall("the same on 2 workers", output)) == 3, output
    assert numbers("accuracy", output)[-1] > 0.85, output
    assert numbers("f1", output)[-1] > 0.85, output


def tune_grid(output: str) -> None:
    small, good, large = numbers("val_loss", output)
    assert good < 0.1 < small and not large < 1, output
    assert "best lr 0.1" in output
    slope, intercept = re.findall(r"y = ([\d.]+) x ([-+][\d.]+)", output)[0]
    assert [float(slope), float(intercept)] == pytest.approx([2, -3], abs=0.3)


def custom_backend(output: str) -> None:
    assert re.search(r"2 workers met in \S+squares-\d+;", output), output
    assert numbers("squares", output) == [sum(number**2 for number in range(1000))], output
    assert numbers("left", output) == [0], "the backend removed what it had made"


def function_best_checkpoints(output: str) -> None:
    losses = numbers("val_loss", output)
    best = sorted(sorted(range(len(losses)), key=losses.__getitem__)[:2])
    assert [int(epoch) for epoch in re.findall(r"kept \S+/checkpoint_\d+ of epoch (\d+)", output)] == best, output
    assert [int(name) for name in re.findall(r"checkpoint_(\d+)", output)] == best, output
    slope, intercept = re.findall(r"y = ([\d.]+) x ([-+][\d.]+)", output)[0]
    assert [float(slope), float(intercept)] == pytest.approx([2, -3], abs=1), output


def function_nothing_on_disk(output: str) -> None:
    loss_falls(output)
    assert re.search(r"resumed at epoch 2; worker failures: [12]", output), output
    assert "newest in memory: epoch 4" in output
    assert "files on disk: 0" in output


def line_learned(output: str) -> list[float]:
    (learned,) = re.findall(r"learned +y = ([\d.]+) x ([-+][\d.]+)", output)
    return [float(part) for part in learned]


def function_regression(output: str) -> None:
    loss_falls(output)
    assert numbers("epoch", output) == [0, 1, 2, 5], "three epochs, then on to the last"
    assert line_learned(output) == pytest.approx([2, -3], abs=0.5)


def function_keras(output: str) -> None:
    loss_falls(output)
    assert numbers("epoch", output) == [0, 1, 2, 2, 3, 4, 5, 6, 7, 7], "the second run goes on where the first ended"
    assert line_learned(output) == pytest.approx([2, -3], abs=0.2)


def function_amp(output: str) -> None:
    first, last = numbers("train_loss", output)[::2], numbers("train_loss", output)[1::2]
    assert len(first) == 2 and all(after < 0.8 * before for before, after in zip(first, last, strict=True)), output
    formats = re.findall(r"computed in torch\.(\w+), kept in torch\.float32\n", output)
    assert formats[0] == "float32" and formats[1] in ("float16", "bfloat16"), output


def function_reproducible(output: str) -> None:
    runs = [numbers("train_loss", line) for line in output.splitlines() if line.startswith("seed ")]
    assert [len(losses) for losses in runs] == [3, 3, 3], output
    assert runs[0] == runs[1] != runs[2], output


def forecasting(output: str) -> None:
    losses = numbers("train_loss", output)
    assert losses[-1] < losses[0] and numbers("val_mase", output)[-1] < 0.5, output
    assert 0.7 < numbers("val_coverage", output)[-1] < 0.9, output


# The last number of a name in the output is between these two.
LAST: dict[str, dict[str, tuple[float, float]]] = {
    "text_classification.py": {"val_f1": (0.9, 1), "val_mcc": (0.85, 1)},
    "contrastive.py": {"val_text_recall_at_5": (0.5, 1)},  # guessing gives 0.05
    "recommender.py": {"val_auc": (0.8, 1)},
    "horovod_digits.py": {"val_accuracy": (0.85, 1)},
    "resnet_generated_images.py": {"val_accuracy": (0.3, 1)},  # ten classes: guessing gives 0.1
    "language_model.py": {"val_perplexity": (4, 10)},
    "segmentation.py": {"val_mean_iou": (0.7, 1)},
    "fine_tuning.py": {"val_perplexity": (0, 15)},
    "diffusion.py": {"val_frechet_distance": (0, 5)},
}
CHECKS: dict[str, Callable[[str], None]] = {
    f"{check.__name__}.py": check
    for check in (
        demo,
        ray_data,
        linear_regression,
        two_models,
        custom_train_epoch,
        from_creators,
        save_and_resume,
        forecasting,
        callbacks_mlflow_tensorboard,
        function_torchmetrics,
        tune_grid,
        custom_backend,
        function_best_checkpoints,
        function_nothing_on_disk,
        function_regression,
        function_keras,
        function_amp,
        function_reproducible,
    )
}


def missing(name: str) -> list[str]:
    """What an example needs that is not installed here."""
    text = path_of(name).read_text(encoding="utf-8")
    operators = re.findall(r"raysgd\.operators\.(\w+) import", text)
    text += "".join((EXAMPLES.parent / f"operators/{each}.py").read_text(encoding="utf-8") for each in operators)
    packages = ["tensorflow", "keras", "mlflow", "tensorboard", "torchmetrics", "pytorch_lightning"]
    packages += ["timm", "transformers", "peft"]
    needs = [package for package in packages if re.search(rf"^ *(import|from) {package}\b", text, re.MULTILINE)]
    needs += ["horovod"] if 'backend="horovod"' in text else []
    return [package for package in needs if importlib.util.find_spec(package) is None]


@pytest.mark.slow
@pytest.mark.script(run=run)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == DEMO else pytest.mark.nightly) for name in SCRIPTS]
)
def test_example(name: str, outcome: Callable[[], str]) -> None:
    if missing(name):
        pytest.skip(f"without {', '.join(missing(name))}")
    # An example that is not listed above must at least print a train_loss that falls.
    CHECKS.get(name, loss_falls)(output := outcome())
    for metric, (lowest, highest) in LAST.get(name, {}).items():
        assert lowest <= numbers(metric, output)[-1] <= highest, output


def test_no_check_without_its_example() -> None:
    assert set(CHECKS) | set(LAST) | ALONE <= set(SCRIPTS)


def lines_of(script: str) -> list[str]:
    """The lines of a script below its docstring, whatever order the imports stand in."""
    body = (EXAMPLES / script).read_text(encoding="utf-8").split('"""', 2)[2]
    return sorted(line for line in body.replace("ray.util.sgd", "raysgd").splitlines() if line)


def migrated(background: Background) -> str:
    """The v1 script, with the one change that the guide names."""
    script = background.folder() / "migrated.py"
    before = (EXAMPLES / "migrate_v1_before.py").read_text(encoding="utf-8")
    script.write_text(before.replace("ray.util.sgd", "raysgd"), encoding="utf-8")
    return printed(background, str(script), connected=False)


def test_migrating_is_one_replacement() -> None:
    assert lines_of("migrate_v1_before.py") == lines_of("migrate_v1_after.py")


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.script(run=migrated)
def test_what_was_migrated_runs(outcome: Callable[[], str]) -> None:
    output = outcome()
    loss_falls(output)
    slope, intercept = numbers("slope", output) + numbers("intercept", output)
    assert [slope, intercept] == pytest.approx([2, 5], abs=1.5)
    assert "success!" in output

"""Scripts as others write them, with the changes that the pages show: undisturbed they have the bits of torchrun, and a kill in the middle
of an epoch changes no result."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig
from raysgd.train import Trainer, world_rank
from tests.faults import once

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytestmark = [pytest.mark.elastic, pytest.mark.more]

SCRIPTS = Path(__file__).parent / "scripts"
PREPARED = {"trainer.train()": "prepare_trainer(trainer).train()"}
STRATEGY = {
    'devices=2,\n        strategy="ddp",\n': "strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()],\n",
    "    model = LitDigits()\n": "    trainer = prepare_trainer(trainer)\n    model = LitDigits()\n",
}
GLUE = "--do_train --do_eval --num_train_epochs 4 --per_device_train_batch_size 8 --learning_rate 3e-3 --warmup_steps 5"
GLUE += " --eval_strategy epoch --save_strategy epoch --save_total_limit 1 --load_best_model_at_end"
GLUE += " --metric_for_best_model accuracy --logging_steps 4 --use_cpu --report_to none"
# The module of raysgd that a script imports, what is replaced in it, and its arguments.
CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "glue": ("huggingface.transformers", PREPARED, f"--output_dir FOLDER {GLUE}"),
    "lora": ("huggingface.transformers", PREPARED, "--output-dir FOLDER"),
    "digits": (
        "lightning",
        STRATEGY,
        "FOLDER",
    ),
}


def run_ported(config: dict[str, Any]) -> None:
    """Run the changed script. Kill rank 1 at a step of it, if there is a mark for that."""
    name, folder = config["name"], config["folder"]
    package, changes, arguments = CASES[name]
    source = f"from raysgd.train.{package} import *\n" + (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    script = sys.modules["ported"] = ModuleType("ported")
    exec(compile(source, "ported", "exec"), vars(script))
    prepare = script.prepare_trainer

    def prepare_trainer(trainer: Any) -> Any:
        callbacks = trainer.callbacks if package == "lightning" else trainer.callback_handler.callbacks
        callbacks.append(killer(package, Path(folder, "killed"), config["step"]))
        return prepare(trainer)

    script.prepare_trainer = prepare_trainer
    given = arguments.replace("FOLDER", folder)
    script.main(given if package == "lightning" else given.split())


def killer(package: str, mark: Path, step: int) -> Any:
    """Return a callback that kills rank 1 once, before an optimizer step."""

    def kill(steps: int) -> None:
        if steps == step and world_rank() == 1 and once(mark):
            os.kill(os.getpid(), signal.SIGKILL)

    if package == "lightning":
        from lightning.pytorch import Callback

        class Lightnings(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                kill(trainer.global_step)

        return Lightnings()
    from transformers import TrainerCallback

    class Transformers(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kill(state.global_step)

    return Transformers()


def results(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the weights that a script has stored, and what it has measured."""
    (weights,) = [*folder.glob("*.safetensors"), *folder.glob("model.pt")]
    if weights.suffix == ".pt":
        return torch.load(weights), json.loads((folder / "test.json").read_text())
    from safetensors.torch import load_file

    state = json.loads(max(folder.rglob("trainer_state.json")).read_text())
    return load_file(weights), {name: state[name] or 0 for name in ("global_step", "best_metric", "best_global_step")}


def import_trainers() -> None:
    import lightning
    import transformers.trainer

    assert lightning and transformers


@pytest.fixture
def trainer(ray_cluster: None, tmp_path: Path) -> Iterator[Trainer]:
    elastic = ElasticConfig(grow=False, hang_timeout_s=280)
    made = Trainer("torch", num_workers=2, logdir=tmp_path / "logs", elastic=elastic)
    made.start(import_trainers)
    yield made
    made.shutdown()


@pytest.mark.parametrize("name", CASES)
def test_a_script_with_the_changes_of_the_page(trainer: Trainer, tmp_path: Path, name: str) -> None:
    folders = {each: tmp_path / each for each in ("plain", "undisturbed", "killed")}
    for each in folders.values():
        each.mkdir()
    arguments = CASES[name][2].replace("FOLDER", str(folders["plain"])).split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    subprocess.run([*command, f"tests.train.scripts.{name}", *arguments], check=True, timeout=280)
    trainer.run(run_ported, {"name": name, "folder": str(folders["undisturbed"]), "step": -1})
    assert trainer.recoveries == []
    trainer.run(run_ported, {"name": name, "folder": str(folders["killed"]), "step": 11})
    assert [(each.in_place, each.world_size_after) for each in trainer.recoveries] == [(True, 1)]
    (plain, measured), (undisturbed, same), (found, near) = map(results, folders.values())
    assert same == measured
    for key, value in plain.items():
        assert torch.equal(undisturbed[key], value), key
        assert (found[key] - value).abs().max() <= (1e-4 if name == "glue" else 1e-6), key
    assert near == pytest.approx(measured, rel=1e-5)

"""With all defaults, a worker that fails and is not replaced changes nothing of what the programs learn; or the log says that it does, as
for the DCGAN and the LightningModule with manual optimization."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.constants import BATCH_SIZE
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault

SIZES = {"length": 16, "width": 16, "heads": 2, "layers": 1, "windows": 18 * 8, "validated": 41, "lr": 0.003}
# module, class, config, and arguments of the trainer: small ones, in single precision.
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        "Writer",
        {"epochs": 2, BATCH_SIZE: 18, **SIZES},
        {"options": TrainingOptions(accumulate=2, clip_norm=1.0), "scheduler_step_freq": "manual"},
    ),
    "resnet": (
        "Stripes",
        {"epochs": 2, BATCH_SIZE: 18, "train": 120, "held_out": 60, "side": 12, "width": 4, "lr": 0.05},
        {"scheduler_step_freq": "epoch"},
    ),
    "text_classifier": (
        "Topics",
        {"epochs": 2, "rows": 120, "batch": 6},
        {"scheduler_step_freq": "batch", "options": TrainingOptions(clip_norm=1.0)},
    ),
}


def trained(name: str, *faults: Fault, workers: int) -> tuple[Any, dict[str, Any], str | None]:
    operator, config, given = PROGRAMS[name]
    program = import_module(f"examples.programs.{name}")
    with (
        Cluster(faults) as cluster,
        TorchTrainer(
            training_operator_cls=getattr(program, operator),
            config=config,
            num_workers=workers,
            use_gpu=False,
            elastic=ElasticConfig(grow=False),
            **given,
        ) as trainer,
    ):
        for _ in range(config["epochs"]):
            trainer.train()
        assert not cluster.left and trainer.world_size == workers - len(faults)
        return trainer.apply_all_operators(left)[0], trainer.validate(), trainer.batch_mode


def left(operator: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and buffers, and the learning rates."""
    (model,), (optimizer,) = operator._parts.models, operator._parts.optimizers
    return dict(model.state_dict()), [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_worker_that_is_not_replaced_changes_nothing(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "text_classifier":
        pytest.importorskip("transformers")
        for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob"):  # which each worker draws by itself
            monkeypatch.setitem(import_module("examples.programs.text_classifier").SIZES, dropout, 0.0)
    (weights, rates), validated, mode = trained(name, Fault("kill", "forward", rank=1, step=3), workers=workers)
    (expected, planned), others, _ = trained(name, workers=workers)
    assert mode == "global" and rates == planned
    for part, value in expected.items():
        torch.testing.assert_close(weights[part], value, rtol=1e-3, atol=2e-5, msg=part)
    numbers = {key: value for key, value in others.items() if isinstance(value, float) and not key.startswith("last_")}
    assert {key: validated[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def rings(folder: Path) -> tuple[Any, dict[str, Any]]:
    from examples.programs.dcgan import Rings

    return Rings, {BATCH_SIZE: 16, "rings": 120, "noise": 8, "width": 4, "lr": 0.002, "pictures": str(folder)}


def coded_curves(folder: Path) -> tuple[Any, dict[str, Any]]:
    pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")
    from examples.programs.lightning_manual import CodedCurves

    return TrainingOperator.from_ptl(CodedCurves), {"rows": 120, "batch": 8}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (rings, "train_batch calls self.zero_grad(), self.backward()"),
        (coded_curves, "a LightningModule makes its steps itself"),
    ],
)
def test_the_log_says_that_a_program_is_per_worker(
    program: Callable[[Path], tuple[Any, dict[str, Any]]],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Lightning sets
    operator, config = program(tmp_path)
    with (
        Cluster([Fault("kill", "applied", rank=1, step=3)]),
        TorchTrainer(
            training_operator_cls=operator,
            config=config,
            num_workers=2,
            use_gpu=False,
            elastic=ElasticConfig(grow=False),
        ) as trainer,
    ):
        trainer.train()
        assert trainer.world_size == 1 and trainer.batch_mode == "per_worker"
    (line,) = [each for each in caplog.messages if "keeps its batch size" in each]
    assert reason in line

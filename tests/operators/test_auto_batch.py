"""With all defaults, a worker that fails and is not replaced changes nothing of what the ready-made operators and the programs learn; or
the log says that it does, as for GANs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from tests.local.group import Cluster, Fault


def segmenter() -> Any:
    """Return the default model without dropout."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 64}
    dropout = {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    return SegformerForSemanticSegmentation(SegformerConfig(num_channels=1, num_labels=3, **sizes, **dropout))


# module, class, config: small, and without what draws random numbers for each worker.
# With SGD where a bias before a BatchNorm has no gradient but rounding, which Adam would scale up.
OPERATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "diffusion": ("raysgd.operators.diffusion", "DiffusionOperator", {"batch_size": 4, "sampling_steps": 2}),
    "fine_tuning": ("raysgd.operators.fine_tuning", "FineTuningOperator", {"epochs": 1, "batch_size": 2}),
    "forecasting": ("raysgd.operators.forecasting", "ForecastingOperator", {"batch_size": 64}),
    "image_classification": (
        "raysgd.operators.image_classification",
        "ImageClassificationOperator",
        {"epochs": 1, "batch_size": 8},
    ),
    "language_model": ("raysgd.operators.language_model", "LanguageModelOperator", {"width": 16, "batch_size": 16}),
    "recommender": ("raysgd.operators.recommender", "RecommenderOperator", {"batch_size": 256}),
    "regression": ("raysgd.operators.regression", "RegressionOperator", {}),
    "segmentation": (
        "raysgd.operators.segmentation",
        "SegmentationOperator",
        {"batch_size": 4, "model": segmenter, "optimizer": torch.optim.SGD, "lr": 0.01},
    ),
    "text_classification": ("raysgd.operators.text_classification", "TextClassificationOperator", {"epochs": 1}),
}
STEPS = 5


def trained(name: str, *faults: Fault, workers: int) -> tuple[dict[str, Any], dict[str, Any], str | None, list[float]]:
    module, kind, config = OPERATORS[name]
    with (
        Cluster(faults) as cluster,
        TorchTrainer(
            training_operator_cls=getattr(import_module(module), kind),
            config=config,
            num_workers=workers,
            use_gpu=False,
            seed=3,
            scheduler_step_freq="batch" if "epochs" in config else None,
            elastic=ElasticConfig(grow=False),
        ) as trainer,
    ):
        trainer.train(num_steps=STEPS)
        assert not cluster.left and trainer.world_size == workers - len(faults)
        validated = trainer.validate()
        weights, rates = trainer.apply_all_operators(left)[0]
        return weights, validated, trainer.batch_mode, rates


def left(operator: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    registered = operator._registered
    weights = {
        f"{number}.{name}": value
        for number, model in enumerate(registered.models)
        for name, value in model.state_dict().items()
    }
    return weights, [float(group["lr"]) for each in registered.optimizers for group in each.param_groups]


@pytest.mark.parametrize(("name", "workers"), [(name, 2 + number % 2) for number, name in enumerate(OPERATORS)])
def test_a_worker_that_is_not_replaced_changes_nothing(name: str, workers: int) -> None:
    for needed in {"fine_tuning": ("transformers", "peft"), "text_classification": ("transformers",)}.get(name, ()):
        pytest.importorskip(needed)
    pytest.importorskip("torchmetrics")
    weights, validated, mode, rates = trained(name, Fault("kill", "forward", rank=1, step=3), workers=workers)
    expected, others, _, planned = trained(name, workers=workers)
    assert mode == "parts" and rates == planned
    for part, value in expected.items():
        torch.testing.assert_close(weights[part], value, rtol=1e-3, atol=1e-5, msg=part)
    numbers = {key: value for key, value in others.items() if isinstance(value, float) and not key.startswith("last_")}
    assert {key: validated[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def test_a_gan_is_per_worker(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchmetrics")
    from raysgd.operators.gan import GANOperator

    with (
        Cluster([Fault("kill", "forward", rank=1, step=3)]),
        TorchTrainer(
            training_operator_cls=GANOperator, num_workers=2, use_gpu=False, elastic=ElasticConfig(grow=False)
        ) as trainer,
    ):
        trainer.train(num_steps=STEPS)
        assert trainer.batch_mode == "per_worker"
    (line,) = [each for each in caplog.messages if "cannot be divided into parts" in each]
    assert "a backward pass after a step, as in a GAN" in line


def test_every_operator_is_here() -> None:
    names: Callable[[str], str] = lambda name: name.rpartition(".")[2]  # noqa: E731
    here = {names(module) for module, _, _ in OPERATORS.values()} | {"gan", "contrastive", "resnet", "recipe"}
    package = import_module("raysgd.operators").__path__[0]
    from pathlib import Path

    assert here == {path.stem for path in Path(package).glob("*.py")} - {"__init__"}

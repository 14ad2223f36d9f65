"""An operator's `metrics` are averaged over batches, workers and failures as what a batch method returns."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.torch.small import Line, inline, rows

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")


class Measuring(Line):
    """Reports the mean of the rows' numbers, which does not depend on the weights, and the output, which does."""

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        return {"target": target.mean(), "output": output.mean()}


def test_the_names_and_the_means_of_both_methods() -> None:
    x, y = rows(11)
    with inline(Measuring, config={"rows": 11, "lr": 0.0}) as trainer:
        output = trainer.get_model()(x).mean().item()
        for result, prefix in ((trainer.train(), "train_"), (trainer.validate(), "val_")):
            assert result[f"{prefix}target"] == pytest.approx(y.mean().item())
            assert result[f"{prefix}output"] == pytest.approx(output)
            assert f"last_{prefix}target" in result and f"{prefix}accuracy" not in result
            assert result["num_samples"] == 11
        assert "train_accuracy" not in trainer.train()


def test_those_of_a_test_have_its_name() -> None:
    class Tested(Measuring):
        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            found = super().loaders(config)
            return {**found, "test_loader": found["validation_loader"]}

    with inline(Tested) as trainer:
        assert trainer.test()["test_target"] == pytest.approx(rows()[1].mean().item())


def test_an_attribute_of_that_name_is_the_users() -> None:
    class Attribute(Line):
        metrics: Any

        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.metrics = nn.Linear(1, 1)

    class OfTheClass(Line):
        metrics: Any = ("accuracy",)

    for operator in (Attribute, OfTheClass):
        with inline(operator) as trainer:
            assert "train_accuracy" not in trainer.train()
            assert trainer.validate()["val_accuracy"] == 0.0


def test_another_result_than_a_dict_is_refused() -> None:
    class Wrong(Line):
        def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Any:
            return 1.0

    for call in ("train", "validate"):
        with inline(Wrong) as trainer, pytest.raises(TypeError, match=r"Wrong\.metrics must return a dict .* got 1\.0"):
            getattr(trainer, call)()

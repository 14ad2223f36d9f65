"""The ready-made regression operator: it learns, its R² is exact, and it refuses wrong shapes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators.regression import RegressionOperator, SameShapeMSELoss, linear_data


def test_learns_the_default_data() -> None:
    with TorchTrainer(training_operator_cls=RegressionOperator) as trainer:
        before = trainer.validate()
        losses = [trainer.train()["train_loss"] for _ in range(3)]
        after = trainer.validate()
        model = trainer.get_model()
    assert losses[2] < losses[0] / 10
    assert before["val_r2"] < 0.5 < 0.99 < after["val_r2"]
    assert after["num_samples"] == 200
    assert model.weight.flatten().tolist() == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert model.bias.item() == pytest.approx(1, abs=0.05)


def test_metrics_are_exact_over_all_validation_data() -> None:
    """Compare with the textbook formulas, for batches of different sizes and two targets of different variance."""
    torch.manual_seed(3)
    inputs = torch.randn(70, 3)
    targets = torch.randn(70, 2) * torch.tensor([1.0, 5.0]) + torch.tensor([0.0, 100.0])
    data = TensorDataset(inputs, targets)
    config = {"train_data": data, "validation_data": lambda: data, "model": partial(nn.Linear, 3, 2)}
    with TorchTrainer(training_operator_cls=RegressionOperator, config=config) as trainer:
        result = trainer.validate()
        model = trainer.get_model(to_cpu=True)
    with torch.no_grad():
        error = model(inputs) - targets
    spread = (targets - targets.mean(dim=0)).square().sum(dim=0)
    r2 = (1 - error.square().sum(dim=0) / spread).mean()
    assert result["val_mse"] == pytest.approx(error.square().mean().item(), rel=1e-4)
    assert result["val_mae"] == pytest.approx(error.abs().mean().item(), rel=1e-4)
    assert result["val_r2"] == pytest.approx(r2.item(), rel=1e-4)


def test_an_optimizer_can_be_passed_and_validation_data_left_out() -> None:
    config = {"train_data": linear_data()[0], "optimizer": torch.optim.Adam, "lr": 0.25}
    with TorchTrainer(training_operator_cls=RegressionOperator, config=config) as trainer:
        optimizer = trainer.apply_all_operators(lambda operator: operator.optimizer)[0]
        losses = [trainer.train()["train_loss"] for _ in range(2)]
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert losses[1] < losses[0]


def test_a_shape_that_would_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(8, 1\) for targets of shape \(8,\)"):
        SameShapeMSELoss()(torch.zeros(8, 1), torch.zeros(8))

"""Regression: fit real-valued targets by least squares. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.regression import RegressionOperator

    with TorchTrainer(training_operator_cls=RegressionOperator, config={"lr": 0.05}) as trainer:
        trainer.train()
        print(trainer.validate()["val_r2"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.operators.recipe import Recipe

__all__ = ["RegressionOperator", "SameShapeMSELoss", "linear_data"]


class RegressionOperator(Recipe):
    """Fits by least squares on batches `(*features, target)`. Validation reports MSE, MAE and R².

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: a function without arguments that returns the module (default: one linear layer, sized by the data)
    - `train_data`, `validation_data`: a dataset, or a function that creates it on the worker
      (default: a noisy linear function of four features)
    - `optimizer`: called with the parameters and `lr=` (default: `torch.optim.SGD`)
    - `lr` (0.05), `batch_size` per worker (32; a global `BATCH_SIZE` overrides it)
    """

    default_optimizer = torch.optim.SGD
    default_lr = 0.05

    def setup(self, config: Mapping[str, Any]) -> None:
        train_data, validation_data = self.make_data(config)
        model = self.make_model(config, train_data)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=self.make_optimizer(model, config), criterion=self.make_criterion(config)
        )
        loaders = self.make_loaders(config, train_data, validation_data)
        if validation_data is not None:
            self.target_variance = self.to_device(self.measure_variance(loaders["validation_loader"]))
        self.register_data(**loaders)

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return linear_data()

    def make_model(self, config: Mapping[str, Any], train_data: Any) -> nn.Module:
        if "model" in config:
            model: nn.Module = config["model"]()
            return model
        features, target = train_data[0]
        return nn.Linear(features.numel(), target.numel())

    def make_criterion(self, config: Mapping[str, Any]) -> nn.Module:
        return SameShapeMSELoss()

    def measure_variance(self, validation_loader: DataLoader[Any]) -> torch.Tensor:
        """Measure the variance of each target over all validation data. This takes one pass over the data, during
        setup."""
        targets = torch.cat([target.float() for *_, target in validation_loader])
        return targets.var(dim=0, correction=0)

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        *features, target = batch
        with self.autocast():
            prediction = self.model(*features)
            loss = self.criterion(prediction, target)
        error = prediction.float() - target.float()
        squared = error.square().mean(dim=0)
        return {
            "val_loss": loss,
            "val_mse": squared.mean(),
            "val_mae": error.abs().mean(),
            # R² needs the variance of *all* targets. With this, it is linear in the squared error, so the mean over batches
            # and workers is exactly the R² of all validation data.
            "val_r2": (1 - squared / self.target_variance).mean(),
            "num_samples": target.size(0),
        }


class SameShapeMSELoss(nn.MSELoss):
    """Mean squared error without broadcasting: (32, 1) against (32,) would silently compare all pairs."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if input.shape != target.shape:
            raise ValueError(
                f"the model returned shape {tuple(input.shape)} for targets of shape {tuple(target.shape)}, and both must be equal: "
                "reshape the targets in the dataset, or the output in the model"
            )
        return super().forward(input, target)


def linear_data(size: int = 1000, *, features: int = 4, noise: float = 0.1) -> tuple[TensorDataset, TensorDataset]:
    """Generate training and validation data (4 to 1) for `y = 1*x1 + 2*x2 + ... + 1`, the same on every worker."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, features, generator=generator)
    weights = torch.arange(1.0, features + 1.0).unsqueeze(1)
    targets = inputs @ weights + 1 + noise * torch.randn(size, 1, generator=generator)
    held_out = size // 5
    return (
        TensorDataset(inputs[held_out:], targets[held_out:]),
        TensorDataset(inputs[:held_out], targets[:held_out]),
    )

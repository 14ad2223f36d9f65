"""Tabular and recommender data: embeddings of categories beside numbers, and the probability of a click. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.recommender import RecommenderOperator

    config = {"train_data": my_rows, "validation_data": other_rows, "cardinalities": (100_000, 5_000, 24), "numbers": 13}
    with TorchTrainer(training_operator_cls=RecommenderOperator, num_workers=2, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_auc"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from raysgd.operators.recipe import Recipe

try:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryCalibrationError
except ImportError as error:
    raise ImportError("raysgd.operators.recommender needs torchmetrics: pip install 'raysgd[operators]'") from error

__all__ = ["FactorizationNet", "RecommenderOperator", "generated_clicks"]


class RecommenderOperator(Recipe):
    """Learns the probability of a click from batches `(categories, numbers, clicked)`: integers (n, columns), real numbers
    (n, columns), and 0 or 1 for each row.

    Training reports `train_loss` (log loss). Validation reports `val_loss`, `val_auc`, `val_average_precision`,
    `val_calibration_error` and `val_click_rate`, over the rows of all workers. `trainer.predict()` returns probabilities.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `train_data`, `validation_data`: a dataset of such rows, or a function that creates it on the worker (default: generated
      clicks of 200 users on 100 items)
    - `cardinalities`: how many values each column of categories has ((200, 100)); `numbers`: how many columns of real numbers
      there are (3)
    - `model`: a function without arguments that returns a module from categories and numbers to one logit per row (default:
      a factorization machine beside a network of linear layers, DeepFM, with embeddings of `width` 16)
    - `lr` (0.01), `weight_decay` (0.01), `batch_size` per worker (256; a global `BATCH_SIZE` overrides it)
    """

    default_batch_size = 256

    def setup(self, config: Mapping[str, Any]) -> None:
        model = self.make_model(config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=self.make_optimizer(model, config), criterion=nn.BCEWithLogitsLoss()
        )
        self.scores = self.register_metrics(validation=self.make_metrics())
        self.register_data(**self.make_loaders(config, *self.make_data(config)))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return generated_clicks()

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        if "model" in config:
            model: nn.Module = config["model"]()
            return model
        return FactorizationNet(
            config.get("cardinalities", (200, 100)), config.get("numbers", 3), width=config.get("width", 16)
        )

    def make_optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        decay = config.get("weight_decay", 0.01)
        return torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-2), weight_decay=decay)

    def make_metrics(self) -> MetricCollection:
        """Make the metrics of a validation. An area under a curve depends on the order of all rows, so it is computed on the
        rows of all workers, and is not a mean of the workers' areas."""
        return MetricCollection(
            {
                "val_auc": BinaryAUROC(),
                "val_average_precision": BinaryAveragePrecision(),
                "val_calibration_error": BinaryCalibrationError(),
                "val_click_rate": MeanMetric(),
            },
            compute_groups=False,
        )

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        categories, numbers, clicked = batch
        with self.autocast():
            loss = self.criterion(self.model(categories, numbers), clicked.float())
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(clicked)}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        categories, numbers, clicked = batch
        with self.autocast():
            logits = self.model(categories, numbers)
            loss = self.criterion(logits, clicked.float())
        for name in ("val_auc", "val_average_precision", "val_calibration_error"):
            self.scores[name].update(logits.float().sigmoid(), clicked.long())
        self.scores["val_click_rate"].update(clicked.float())
        return {"val_loss": loss, "num_samples": len(clicked)}

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> torch.Tensor:
        with self.autocast():
            logits: torch.Tensor = self.model(batch[0], batch[1])
        return logits.float().sigmoid()


class FactorizationNet(nn.Module):
    """DeepFM (Guo et al., 2017): weights of single categories, products of each two embeddings, and linear layers."""

    def __init__(self, cardinalities: Sequence[int], numbers: int, *, width: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count in cardinalities)
        self.weights = nn.ModuleList(nn.Embedding(count, 1) for count in cardinalities)
        for table in (*self.embeddings, *self.weights):
            nn.init.normal_(table.weight, std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(len(cardinalities) * width + numbers, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        columns = categories.unbind(dim=1)
        found = torch.stack([table(each) for table, each in zip(self.embeddings, columns, strict=True)], dim=1)
        single = torch.cat([table(each) for table, each in zip(self.weights, columns, strict=True)], dim=1).sum(dim=1)
        # The sum of the products of each two embeddings, without computing each product.
        pairs = (found.sum(dim=1).square() - found.square().sum(dim=1)).sum(dim=1) / 2
        deep: torch.Tensor = self.deep(torch.cat([found.flatten(1), numbers], dim=1)).squeeze(1)
        return single + pairs + deep


def generated_clicks(count: int = 20_000, *, users: int = 200, items: int = 100) -> tuple[TensorDataset, TensorDataset]:
    """Generate training and validation rows (4 to 1). Whether a user clicks depends on how well the hidden tastes of user and item
    fit, on the item, and on the first of three numbers."""
    generator = torch.Generator().manual_seed(0)
    tastes, kinds = (torch.randn(number, 3, generator=generator) for number in (users, items))
    popular = torch.randn(items, generator=generator)
    user = torch.randint(users, (count,), generator=generator)
    item = torch.randint(items, (count,), generator=generator)
    numbers = torch.randn(count, 3, generator=generator)
    logits = 1.5 * (tastes[user] * kinds[item]).sum(dim=1) + popular[item] + numbers[:, 0] - 1
    clicked = (torch.rand(count, generator=generator) < logits.sigmoid()).long()
    rows, held_out = (torch.stack([user, item], dim=1), numbers, clicked), count // 5
    return TensorDataset(*(each[held_out:] for each in rows)), TensorDataset(*(each[:held_out] for each in rows))

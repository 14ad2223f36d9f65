"""Image classification with cross entropy, top-1 and top-5 accuracy. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.image_classification import ImageClassificationOperator

    config = {"model": MyNet, "train_data": my_training_images, "validation_data": my_other_images, "lr": 0.1}
    with TorchTrainer(training_operator_cls=ImageClassificationOperator, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_accuracy"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.constants import BATCH_SIZE
from raysgd.torch import TrainingOperator

__all__ = ["ImageClassificationOperator", "SmallConvNet", "digits_data", "topk_accuracy"]


class ImageClassificationOperator(TrainingOperator):
    """Classifies images. Training and validation report loss and accuracy, and validation also top-5 accuracy.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: a function without arguments that returns the module (default: a small convolutional net)
    - `train_data`, `validation_data`: a dataset of `(image, label)`, or a function that creates it on the
      worker (default: the 8x8 digits of scikit-learn)
    - `optimizer`: called with the parameters and `lr=` (default: SGD with momentum)
    - `scheduler`: called with the optimizer; the trainer's `scheduler_step_freq` determines when it steps
    - `lr` (0.05), `batch_size` per worker (32; a global `BATCH_SIZE` overrides it),
      `loader`: more arguments for both `DataLoader`s, such as `num_workers`
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        model = self.make_model(config)
        optimizer = self.make_optimizer(model, config)
        parts: dict[str, Any] = {"models": model, "optimizers": optimizer, "criterion": self.make_criterion(config)}
        scheduler = self.make_scheduler(optimizer, config)
        if scheduler is None:
            self.model, self.optimizer, self.criterion = self.register(**parts)
        else:
            registered = self.register(**parts, schedulers=scheduler)
            self.model, self.optimizer, self.criterion, self.scheduler = registered

        train_data, validation_data = self.make_data(config)
        batch_size = config.get(BATCH_SIZE, config.get("batch_size", 32))
        options = {"batch_size": batch_size, **config.get("loader", {})}
        self.register_data(
            train_loader=DataLoader(train_data, shuffle=True, **options),
            validation_loader=None if validation_data is None else DataLoader(validation_data, **options),
        )

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the training and the validation dataset. The second may be None."""
        train_data, validation_data = config.get("train_data"), config.get("validation_data")
        if train_data is None:
            train_data, digits = digits_data()
            validation_data = digits if validation_data is None else validation_data
        return (
            train_data() if callable(train_data) else train_data,
            validation_data() if callable(validation_data) else validation_data,
        )

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        model: nn.Module = config.get("model", SmallConvNet)()
        return model

    def make_optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        lr = config.get("lr", 0.05)
        if "optimizer" in config:
            optimizer: torch.optim.Optimizer = config["optimizer"](model.parameters(), lr=lr)
            return optimizer
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
        """Return a learning rate scheduler, or None."""
        return config["scheduler"](optimizer) if "scheduler" in config else None

    def make_criterion(self, config: Mapping[str, Any]) -> nn.Module:
        return nn.CrossEntropyLoss()

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, labels = batch
        with self.autocast():
            logits = self.model(images)
            loss = self.criterion(logits, labels)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {
            "train_loss": loss.detach(),
            "train_accuracy": topk_accuracy(logits.detach(), labels, k=1),
            "num_samples": labels.size(0),
        }

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, labels = batch
        with self.autocast():
            logits = self.model(images)
            loss = self.criterion(logits, labels)
        return {
            "val_loss": loss,
            "val_accuracy": topk_accuracy(logits, labels, k=1),
            "val_top5_accuracy": topk_accuracy(logits, labels, k=5),
            "num_samples": labels.size(0),
        }


def topk_accuracy(logits: torch.Tensor, labels: torch.Tensor, *, k: int) -> torch.Tensor:
    """Return the fraction of samples whose label is among the k highest scores, as a tensor on the same device."""
    best = logits.topk(min(k, logits.size(1)), dim=1).indices
    return (best == labels.unsqueeze(1)).any(dim=1).float().mean()


class SmallConvNet(nn.Module):
    """Two convolutions and a linear layer, for images of any size. (The default data has 8x8 pixels.)"""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
        )
        self.classify = nn.Linear(32 * 4 * 4, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classify(self.features(images).flatten(1))
        return logits


def digits_data() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1797 digits as images in [0, 1]. Every fifth is for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the default data are scikit-learn's digits, and scikit-learn is not installed: pip install scikit-learn, or pass "
            'your own data as config["train_data"]'
        ) from error
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    train_data = TensorDataset(images[~held_out], labels[~held_out])
    return train_data, TensorDataset(images[held_out], labels[held_out])

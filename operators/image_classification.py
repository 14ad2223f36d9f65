"""Image classification: augmentation, mixup, a warm-up and a cosine; top-1 and top-5 accuracy. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.image_classification import ImageClassificationOperator

    config = {"model": "resnet50", "classes": 100, "train_data": my_images, "validation_data": my_other_images}
    config |= {"train_transform": augment, "mixup": 0.2, "label_smoothing": 0.1, "lr": 0.4, "epochs": 90}
    with TorchTrainer(
        training_operator_cls=ImageClassificationOperator,
        num_workers=8,
        config=config,
        scheduler_step_freq="batch",
    ) as trainer:
        for _ in trainer.epochs(90):
            trainer.train()
            print(trainer.validate()["val_accuracy"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import one_hot
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import Dataset, TensorDataset

from raysgd.data import SampleSeeds
from raysgd.errors import ConfigError
from raysgd.operators.recipe import Recipe

__all__ = ["ImageClassificationOperator", "SmallConvNet", "digits_data", "topk_accuracy"]


class ImageClassificationOperator(Recipe):
    """Classifies images. Training and validation report loss and accuracy, and validation also top-5 accuracy.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: a function without arguments that returns the module, or the name of a model of timm, which is created with
      `model_options` (such as `pretrained=True`) and `classes` outputs (default: a small convolutional net)
    - `train_data`, `validation_data`: a dataset of `(image, label)`, or a function that creates it on the
      worker (default: the 8x8 digits of scikit-learn)
    - `train_transform`, `validation_transform`: called with each image, for example one of timm or torchvision. Random numbers
      of the first one depend on `seed` (0), the epoch and the sample's index, and not on the workers
    - `mixup`: the parameter of its Beta distribution, or a function of a batch's images and labels that returns mixed images
      and probabilities, such as timm's `Mixup` or torchvision's `CutMix`. `train_accuracy` then counts the most probable class
    - `classes`: how many there are (10), for `mixup` and models of timm; `label_smoothing` (0)
    - `optimizer`: called with the parameters and `lr=` (default: SGD with momentum 0.9 and `weight_decay`, 0)
    - `epochs`: with it, the learning rate rises in a `warmup` (0.05 of the steps), then falls to 0 as a cosine; the trainer
      needs `scheduler_step_freq="batch"`
    - `scheduler`, instead of `epochs`: called with the optimizer; the trainer's `scheduler_step_freq` determines when it steps
    - `lr` (0.05), `batch_size` per worker (32; a global `BATCH_SIZE` overrides it),
      `loader`: more arguments for both `DataLoader`s, such as `num_workers`
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        self.classes: int = config.get("classes", 10)
        self.mixup = config.get("mixup", 0)
        self.register_data(**self.make_loaders(config, *self.make_data(config), **config.get("loader", {})))
        model = self.make_model(config)
        optimizer = self.make_optimizer(model, config)
        parts: dict[str, Any] = {"models": model, "optimizers": optimizer, "criterion": self.make_criterion(config)}
        scheduler = self.make_scheduler(optimizer, config)
        if scheduler is None:
            self.model, self.optimizer, self.criterion = self.register(**parts)
        else:
            registered = self.register(**parts, schedulers=scheduler)
            self.model, self.optimizer, self.criterion, self.scheduler = registered

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return digits_data()

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        train_data, validation_data = super().make_data(config)
        if "train_transform" in config:
            train_data = SampleSeeds(Transformed(train_data, config["train_transform"]), seed=config.get("seed", 0))
        if "validation_transform" in config and validation_data is not None:
            validation_data = Transformed(validation_data, config["validation_transform"])
        return train_data, validation_data

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        given = config.get("model", SmallConvNet)
        if not isinstance(given, str):
            model: nn.Module = given()
            return model
        try:
            import timm
        except ImportError as error:
            raise ImportError(
                f'config["model"] is the name {given!r}, and models of timm need timm and torchvision: pip install '
                "'raysgd[operators]', or pass a function that returns your own module"
            ) from error
        of_timm: nn.Module = timm.create_model(given, num_classes=self.classes, **config.get("model_options", {}))
        return of_timm

    def make_optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        lr = config.get("lr", 0.05)
        if "optimizer" in config:
            optimizer: torch.optim.Optimizer = config["optimizer"](model.parameters(), lr=lr)
            return optimizer
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=config.get("weight_decay", 0))

    def make_scheduler(self, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
        """Make a learning rate scheduler, or None."""
        if "epochs" not in config:
            return config["scheduler"](optimizer) if "scheduler" in config else None
        if "scheduler" in config:
            raise ConfigError(
                'config has "epochs", which sets a warm-up and a cosine, and "scheduler": pass one of them'
            )
        steps = self.total_steps(epochs=config["epochs"])
        warmup = round(config.get("warmup", 0.05) * steps)
        cosine = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
        if not warmup:
            return cosine
        return SequentialLR(optimizer, [LinearLR(optimizer, 1 / (warmup + 1), 1, warmup), cosine], [warmup])

    def make_criterion(self, config: Mapping[str, Any]) -> nn.Module:
        return nn.CrossEntropyLoss(label_smoothing=config.get("label_smoothing", 0.0))

    def mix(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix the images of a batch with those of its reverse, and likewise the labels' shares (Zhang et al., 2018)."""
        if callable(self.mixup):
            mixed: tuple[torch.Tensor, torch.Tensor] = self.mixup(images, labels)
            return mixed
        if not self.mixup:
            return images, labels
        share = float(torch.distributions.Beta(self.mixup, self.mixup).sample())
        shares = one_hot(labels, self.classes).to(images.dtype)
        return images.lerp(images.flip(0), 1 - share), shares.lerp(shares.flip(0), 1 - share)

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, labels = self.mix(*batch)
        with self.autocast():
            logits = self.model(images)
            loss = self.criterion(logits, labels)
        if labels.dim() > 1:
            labels = labels.argmax(dim=1)
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
    """Compute the fraction of samples whose label is among the k highest scores, as a tensor on the same device."""
    best = logits.topk(min(k, logits.size(1)), dim=1).indices
    return (best == labels.unsqueeze(1)).any(dim=1).float().mean()


class Transformed(Dataset[tuple[Any, Any]]):
    """A dataset of `(image, label)` with a function applied to each image."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.dataset[index]
        return self.transform(image), label


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
    """Load scikit-learn's 1797 digits as images in [0, 1]. Every fifth is for validation."""
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

"""Semantic segmentation: a class for each pixel, with intersection over union (IoU). Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.segmentation import SegmentationOperator

    config = {"train_data": street_scenes, "validation_data": other_scenes, "classes": 19, "channels": 3}
    with TorchTrainer(training_operator_cls=SegmentationOperator, num_workers=2, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_mean_iou"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from raysgd.operators.recipe import Recipe

try:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
    from torchmetrics.wrappers import ClasswiseWrapper
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
except ImportError as error:
    raise ImportError(
        "raysgd.operators.segmentation needs torchmetrics and transformers: pip install 'raysgd[operators]'"
    ) from error

__all__ = ["IGNORED", "SegmentationOperator", "Shapes"]

IGNORED = 255  # the class of pixels that count neither for the loss nor for the metrics


class SegmentationOperator(Recipe):
    """Learns the class of each pixel from batches `(images, masks)`. Pixels whose mask is 255 are ignored.

    Training reports `train_loss`. Validation reports `val_loss`, `val_pixel_accuracy`, the IoU of each class (`val_iou_0`, ...)
    and their mean over the classes that occur, `val_mean_iou`. All of them are computed from the counts of all pixels on all
    workers. `trainer.predict()` returns the class of each pixel.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: a function without arguments that returns the module (default: a small SegFormer). It returns the scores
      (n, classes, height, width), or an object with `logits`, or a dict with `out`, as the models of transformers and
      torchvision do. Scores of a lower resolution are interpolated
    - `train_data`, `validation_data`: a dataset of `(image, mask)`, or a function that creates it on the worker (default:
      discs and bars in noise)
    - `classes` (3), `channels` of the images (1), `ignored` (255)
    - `optimizer`: called with the parameters and `lr=` (default: AdamW)
    - `lr` (0.006), `batch_size` per worker (16; a global `BATCH_SIZE` overrides it)
    """

    default_batch_size = 16
    default_lr = 6e-3

    def setup(self, config: Mapping[str, Any]) -> None:
        self.classes: int = config.get("classes", 3)
        self.ignored: int = config.get("ignored", IGNORED)
        model = self.make_model(config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=self.make_optimizer(model, config), criterion=self.make_criterion(config)
        )
        self.scores = self.register_metrics(validation=self.make_metrics())
        self.register_data(**self.make_loaders(config, *self.make_data(config)))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return Shapes(256, seed=1), Shapes(64, seed=2)

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        if "model" in config:
            model: nn.Module = config["model"]()
            return model
        settings = SegformerConfig(
            num_channels=config.get("channels", 1),
            num_labels=self.classes,
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 48, 64],
            num_attention_heads=[1, 1, 2, 4],
            patch_sizes=[3, 3, 3, 3],
            strides=[2, 2, 2, 2],  # scores of half the resolution; those of the published models have a quarter
            decoder_hidden_size=64,
        )
        small: nn.Module = SegformerForSemanticSegmentation(settings)
        return small

    def make_criterion(self, config: Mapping[str, Any]) -> nn.Module:
        return nn.CrossEntropyLoss(ignore_index=self.ignored)

    def make_metrics(self) -> MetricCollection:
        """Make the metrics of a validation. They add up counts over batches and workers, and divide at the end: a mean
        of the batches' IoUs would be another number."""
        options: dict[str, Any] = {"num_classes": self.classes, "ignore_index": self.ignored}
        names = [str(label) for label in range(self.classes)]
        return MetricCollection(
            {
                "val_loss": MeanMetric(),
                "val_pixel_accuracy": MulticlassAccuracy(**options, average="micro"),
                "val_mean_iou": MulticlassJaccardIndex(**options),
                "val_iou": ClasswiseWrapper(
                    MulticlassJaccardIndex(**options, average="none"), names, prefix="val_iou_"
                ),
            },
            compute_groups=False,
        )

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, masks = batch
        with self.autocast():
            loss = self.criterion(self.score(images, masks.shape[-2:]), masks)
        counted = (masks != self.ignored).sum()
        self.zero_grad(self.optimizer)
        self.backward(loss, count=counted)
        self.step(self.optimizer)
        return {"train_loss": (loss.detach(), counted), "num_samples": masks.size(0)}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, masks = batch
        with self.autocast():
            scores = self.score(images, masks.shape[-2:])
            loss = self.criterion(scores, masks)
        counted = (masks != self.ignored).sum()
        if counted:  # the loss of a batch in which all pixels are ignored is NaN
            self.scores["val_loss"].update(loss, counted)
        for name in ("val_pixel_accuracy", "val_mean_iou", "val_iou"):
            self.scores[name].update(scores.argmax(dim=1), masks)
        return {"num_samples": masks.size(0)}

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> torch.Tensor:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        with self.autocast():
            scores = self.score(images, images.shape[-2:])
        return scores.argmax(dim=1)

    def score(self, images: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """Compute the scores (n, classes, height, width), in single precision and in the masks' size."""
        output = self.model(images)
        found = output["out"] if isinstance(output, dict) and "out" in output else getattr(output, "logits", output)
        scores: torch.Tensor = found.float()
        if scores.shape[-2:] == size:
            return scores
        return interpolate(scores, size=size, mode="bilinear", align_corners=False)


class Shapes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy images of one disc (class 1) and one bar (class 2), equally bright. Each is generated from its index."""

    def __init__(self, length: int, *, seed: int, size: int = 32, noise: float = 0.2) -> None:
        self.length, self.seed, self.size, self.noise = length, seed, size, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"there is no image {index}: there are {self.length}")
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        radius = self.size // 6 + 1
        places = torch.randint(radius, self.size - radius, (2, 2), generator=generator)
        rows, columns = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        mask = torch.zeros(self.size, self.size, dtype=torch.long)
        for label, (row, column) in enumerate(places.tolist(), start=1):
            down, across = rows - row, columns - column
            disc, bar = down**2 + across**2 <= radius**2, (down.abs() <= 2) & (across.abs() <= radius)
            mask[disc if label == 1 else bar] = label
        image = (mask > 0).float() + self.noise * torch.randn(self.size, self.size, generator=generator)
        return image.unsqueeze(0), mask

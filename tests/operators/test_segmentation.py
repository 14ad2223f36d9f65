"""The ready-made segmentation operator: it finds shapes, and its IoU counts every pixel of all workers once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer

pytest.importorskip("torchmetrics")
pytest.importorskip("transformers")

from raysgd.operators.segmentation import IGNORED, SegmentationOperator, Shapes
from tests.local.group import Cluster


@pytest.mark.more
def test_finds_discs_and_bars() -> None:
    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=SegmentationOperator) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(6)]
        result = trainer.validate()
        predicted = trainer.predict(Shapes(5, seed=2))
    assert losses[-1] < losses[0] / 3
    assert result["val_mean_iou"] > 0.7 and result["val_pixel_accuracy"] > 0.95
    each = [result[f"val_iou_{label}"] for label in range(3)]
    assert result["val_mean_iou"] == pytest.approx(sum(each) / 3)
    masks = torch.stack([mask for _, mask in Shapes(5, seed=2)])
    assert predicted.shape == masks.shape and (predicted == masks).float().mean() > 0.9


def images_with_ignored_pixels(count: int = 13) -> TensorDataset:
    """Return images whose numbers of pixels per class, and of ignored pixels, differ very much."""
    generator = torch.Generator().manual_seed(5)
    masks = torch.stack([torch.randint(1 + number % 3, (6, 6), generator=generator) for number in range(count)])
    masks[torch.rand(masks.shape, generator=generator) < torch.linspace(0, 1, count).view(-1, 1, 1)] = IGNORED
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator), masks)


def convolution() -> nn.Module:
    torch.manual_seed(1)
    return nn.Conv2d(1, 3, 3, padding=1)


def test_metrics_are_exact_over_all_pixels() -> None:
    """Compare with the definitions, on the images of both workers at once."""
    data = images_with_ignored_pixels()
    config = {"model": convolution, "train_data": data, "validation_data": data, "batch_size": 2}
    with Cluster(), TorchTrainer(training_operator_cls=SegmentationOperator, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=2)
        result = trainer.validate()
        model = trainer.get_model()
    images, masks = data.tensors
    with torch.no_grad():
        scores = model.cpu()(images)
    counts, right = masks != IGNORED, scores.argmax(dim=1)[masks != IGNORED] == masks[masks != IGNORED]
    found, truth = scores.argmax(dim=1)[counts], masks[counts]
    each = [float(((found == k) & (truth == k)).sum() / ((found == k) | (truth == k)).sum()) for k in range(3)]
    assert [result[f"val_iou_{k}"] for k in range(3)] == pytest.approx(each)
    assert result["val_mean_iou"] == pytest.approx(sum(each) / 3)
    assert result["val_pixel_accuracy"] == pytest.approx(float(right.float().mean()))
    assert result["val_loss"] == pytest.approx(float(cross_entropy(scores, masks, ignore_index=IGNORED)), rel=1e-5)
    assert result["num_samples"] == 13


class HalfSize(nn.Module):
    """Returns scores of half the resolution in a dictionary, as torchvision's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 2, stride=2)

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        return {"out": self.layer(images)}


def test_other_models_and_data_can_be_configured() -> None:
    config = {
        "model": HalfSize,
        "classes": 2,
        "train_data": lambda: TensorDataset(torch.rand(10, 3, 8, 8), torch.randint(2, (10, 8, 8))),
        "optimizer": partial(torch.optim.SGD, momentum=0.9),
        "lr": 0.1,
    }
    with TorchTrainer(training_operator_cls=SegmentationOperator, config=config) as trainer:
        assert trainer.train()["num_samples"] == 10
        assert trainer.predict([torch.rand(3, 8, 8)]).shape == (1, 8, 8)

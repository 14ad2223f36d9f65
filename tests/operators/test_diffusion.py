"""The ready-made diffusion operator: it draws digits, and neither its metrics nor its training depend on the workers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.image_classification import digits_data

pytest.importorskip("torchmetrics")

from raysgd.operators.diffusion import DiffusionOperator, Noised, SmallUNet
from tests.local.group import Cluster


def nearest(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances to the nearest digits of the training data, and their labels."""
    digits, labels = digits_data()[0].tensors
    distances, found = torch.cdist(images.flatten(1), digits.flatten(1)).min(dim=1)
    return distances, labels[found]


@pytest.mark.more
def test_draws_digits() -> None:
    torch.manual_seed(0)
    config = {"batch_size": 64, "lr": 4e-3, "sampling_steps": 10}
    with TorchTrainer(training_operator_cls=DiffusionOperator, config=config) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(6)]
        result = trainer.validate()
        images = trainer.predict(torch.randn(100, 1, 8, 8))
    assert losses[-1] < 0.4 and result["val_loss"] < 0.4, "about 1 without training"
    assert result["val_frechet_distance"] < 4, "noise is at 43"
    distances, labels = nearest((images + 1) / 2)
    assert len(labels.unique()) == 10, "all ten digits"
    assert distances.mean() < nearest(torch.rand(100, 64))[0].mean() / 2


def pictures(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def layer() -> nn.Module:
    torch.manual_seed(2)
    return SmallUNet(width=8)


class Corners(nn.Module):
    num_features = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0, :3]


def frechet(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return |difference of the means|^2 + trace(A + B - 2 sqrt(A B)), of covariances A and B."""
    a, b = one.double().T.cov(), other.double().T.cov()
    root = torch.linalg.eigvals(a @ b).sqrt().real.sum()
    return float((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * root)


def test_metrics_are_exact_over_all_images() -> None:
    """Compare with the definitions, on the images of both workers at once."""
    images, held_out = pictures(12, 0), pictures(13, 1)
    config = {"model": layer, "train_data": images, "validation_data": held_out, "features": Corners, "batch_size": 3}
    with Cluster(), TorchTrainer(training_operator_cls=DiffusionOperator, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=2)
        result, again = trainer.validate(), trainer.validate()
        operator = trainer.get_local_operator()
        _, times, noises = (torch.stack(each) for each in zip(*Noised(held_out, seed=0), strict=True))
        generated = trainer.predict(noises)
        operator.model.eval()
        with torch.no_grad():
            loss = operator.loss(held_out, times, noises)
    assert result["num_samples"] == 13
    assert result["val_loss"] == again["val_loss"] == pytest.approx(float(loss), rel=1e-5)
    expected = frechet(held_out[:, 0, 0, :3], generated[:, 0, 0, :3])
    assert result["val_frechet_distance"] == pytest.approx(expected, rel=1e-4)


def test_training_does_not_depend_on_the_workers() -> None:
    """Each sample has the same time and noise on any worker, and other ones in the next epoch."""
    config = {"model": layer, "train_data": pictures(24, 0), BATCH_SIZE: 8, "optimizer": torch.optim.SGD, "lr": 0.1}
    found: list[Any] = []
    for workers in (1, 2):
        with (
            Cluster(),
            TorchTrainer(
                training_operator_cls=DiffusionOperator, config=config, num_workers=workers, seed=0
            ) as trainer,
        ):
            losses = [trainer.train()["train_loss"] for _ in range(2)]
            found.append((losses, trainer.get_model().state_dict()))
    (ones, one), (others, other) = found
    assert ones == pytest.approx(others, rel=1e-4) and abs(ones[0] - ones[1]) > 1e-3
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


class Still(nn.Module):
    """Returns an object with `sample`, as the models of diffusers do: the velocity if each image is of this color."""

    def __init__(self, color: float) -> None:
        super().__init__()
        self.color = nn.Parameter(torch.tensor(color))

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> SimpleNamespace:
        angle = (times / 1000 * torch.pi / 2).view(-1, 1, 1, 1)
        noise = (noisy - angle.cos() * self.color) / angle.sin()
        return SimpleNamespace(sample=angle.cos() * noise - angle.sin() * self.color)


def test_sampling_with_a_perfect_model_returns_the_image() -> None:
    config = {
        "model": partial(Still, 0.25),
        "train_data": lambda: [(image, 3) for image in torch.full((10, 3, 6, 6), 0.25)],
        "lr": 1e-6,
        "sampling_steps": 3,
    }
    with TorchTrainer(training_operator_cls=DiffusionOperator, config=config) as trainer:
        assert trainer.predict(torch.randn(5, 3, 6, 6)) == pytest.approx(torch.full((5, 3, 6, 6), 0.25), abs=1e-4)
        result = trainer.train()
    assert result["num_samples"] == 10 and result["train_loss"] < 1e-6, "the model knows the velocity"

"""Denoising diffusion: images from noise, with the Fréchet distance over all workers. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.diffusion import DiffusionOperator

    config = {"model": MyUNet, "train_data": my_images, "validation_data": my_other_images}
    with TorchTrainer(training_operator_cls=DiffusionOperator, num_workers=2, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_frechet_distance"])
        images = trainer.predict(torch.randn(64, 3, 32, 32))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate, mse_loss, silu
from torch.utils.data import Dataset

from raysgd.data import SampleSeeds
from raysgd.operators.image_classification import digits_data
from raysgd.operators.recipe import Recipe

try:
    from torchmetrics import MetricCollection
    from torchmetrics.image.fid import FrechetInceptionDistance
except ImportError as error:
    raise ImportError("raysgd.operators.diffusion needs torchmetrics: pip install 'raysgd[operators]'") from error

__all__ = ["DiffusionOperator", "SmallUNet"]


class DiffusionOperator(Recipe):
    """Learns to turn noise into images like those of the data.

    A noisy image of time t is `cos(pi t / 2) * image + sin(pi t / 2) * noise` (the cosine schedule), and the model predicts
    its velocity, `cos * noise - sin * image` (Salimans and Ho, 2022), from which image and noise follow. `trainer.predict(noise)`
    goes from t = 1 to 0 in equal steps (DDIM), on all workers.

    The time and the noise of a sample depend on the seed, the epoch and the sample's index, so training does not depend on the
    number of workers. Training reports `train_loss`. Validation reports `val_loss`, and `val_frechet_distance` between the
    validation data and as many generated images, from sums over all workers. Both use the same noise each time.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: a function without arguments that returns the module (default: `SmallUNet`). It is called with noisy images and
      times from 0 to 1000, and returns the velocity, or an object with `sample`, as the models of diffusers do
    - `train_data`, `validation_data`: a dataset of images in [-1, 1], or of tuples that begin with one, or a function that
      creates it on the worker (default: the 8x8 digits of scikit-learn)
    - `features`: a function that returns the module whose features the Fréchet distance compares, with an attribute
      `num_features` (default: the pixels, averaged to 8x8). With those of Inception, the distance is the FID
    - `sampling_steps` (20), `seed` of the noise (0)
    - `optimizer`: called with the parameters and `lr=` (default: AdamW)
    - `lr` (0.002), `batch_size` per worker (32; a global `BATCH_SIZE` overrides it)
    """

    default_lr = 2e-3

    def setup(self, config: Mapping[str, Any]) -> None:
        self.sampling_steps: int = config.get("sampling_steps", 20)
        train_data, validation_data = self.make_data(config)
        channels = len(_image(train_data[0]))
        model = self.make_model(config, channels)
        self.model, self.optimizer = self.register(models=model, optimizers=self.make_optimizer(model, config))
        features = config["features"]() if "features" in config else Pixels(channels)
        # It adds up the features and their products over batches and workers; a mean of the workers' distances is another number.
        distance = MetricCollection({"val_frechet_distance": FrechetInceptionDistance(feature=features)})
        self.distance = self.register_metrics(validation=distance)["val_frechet_distance"]
        seed = config.get("seed", 0)
        held_out = None if validation_data is None else Noised(validation_data, seed=seed)
        self.register_data(**self.make_loaders(config, SampleSeeds(Noised(train_data), seed=seed), held_out))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        train_data, validation_data = ([2 * image - 1 for image in part.tensors[0]] for part in digits_data())
        return train_data, validation_data

    def make_model(self, config: Mapping[str, Any], channels: int) -> nn.Module:
        model: nn.Module = config["model"]() if "model" in config else SmallUNet(channels)
        return model

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        loss = self.loss(*batch)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        images, _, noise = batch
        self.distance.update(images, real=True)
        self.distance.update(self.generate(noise), real=False)
        return {"val_loss": self.loss(*batch), "num_samples": len(images)}

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> torch.Tensor:
        return self.generate(_image(batch))

    def loss(self, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error of the velocity."""
        cos, sin = cosine_schedule(times)
        return mse_loss(self.velocity(cos * images + sin * noise, times), cos * noise - sin * images)

    def velocity(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            output = self.model(noisy, 1000 * times)
        velocity: torch.Tensor = getattr(output, "sample", output)
        return velocity.float()

    @torch.no_grad()
    def generate(self, noise: torch.Tensor) -> torch.Tensor:
        """Generate an image for each noise. DDIM: predict the image and the noise in it, and mix them for the next
        time."""
        mixed = noise
        times = torch.linspace(1, 0, self.sampling_steps + 1, device=noise.device)
        for now, later in pairwise(times):
            (cos, sin), (next_cos, next_sin) = cosine_schedule(now), cosine_schedule(later)
            velocity = self.velocity(mixed, now.expand(len(noise)))
            image = (cos * mixed - sin * velocity).clamp(-1, 1)
            mixed = next_cos * image + next_sin * (sin * mixed + cos * velocity)
        return mixed


def cosine_schedule(times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of the image and of the noise, in the shape of images."""
    angles = times.view(-1, 1, 1, 1) * (math.pi / 2)
    return angles.cos(), angles.sin()


def _image(sample: Any) -> torch.Tensor:
    image: torch.Tensor = sample[0] if isinstance(sample, (tuple, list)) else sample
    return image


class Noised(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Each image with a time and noise. With a seed, they are the same each time; without one, they are drawn."""

    def __init__(self, images: Any, *, seed: int | None = None) -> None:
        self.images, self.seed = images, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        image = _image(self.images[index])  # it raises an IndexError behind the last one
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return image, torch.rand((), generator=generator), torch.randn(image.shape, generator=generator)


class Pixels(nn.Module):
    """The pixels of an image as features: the mean colour of each of 8 x 8 fields."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_features = 64 * channels
        self.pool = nn.AdaptiveAvgPool2d(8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = self.pool(images).flatten(1)
        return pixels


class Block(nn.Module):
    """Two convolutions with a shortcut. The time scales and shifts what is between them."""

    def __init__(self, channels_in: int, width: int, time_width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels_in), nn.SiLU(), nn.Conv2d(channels_in, width, 3, padding=1))
        self.time = nn.Linear(time_width, 2 * width)
        self.norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, width, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm(self.first(x)) * (1 + scale) + shift
        out: torch.Tensor = self.second(silu(hidden)) + self.shortcut(x)
        return out


class SmallUNet(nn.Module):
    """Two resolutions, and one block at each, down and up. For images with sides that 2 divides."""

    def __init__(self, channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.low, self.middle, self.up = (
            Block(channels_in, width_out, 4 * width)
            for channels_in, width_out in (
                (width, width),
                (width, 2 * width),
                (2 * width, 2 * width),
                (3 * width, width),
            )
        )
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        rates = torch.logspace(0, -3, self.width, device=times.device)
        angles = times.view(-1, 1) * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        high = self.down(self.stem(images), time)
        low = self.middle(self.low(interpolate(high, scale_factor=0.5, mode="area"), time), time)
        up = self.up(torch.cat([high, interpolate(low, scale_factor=2.0)], dim=1), time)
        velocity: torch.Tensor = self.head(up)
        return velocity

"""A generative adversarial network: two models and two optimizers in one operator. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.gan import GANOperator

    with TorchTrainer(training_operator_cls=GANOperator, num_workers=2) as trainer:
        result = trainer.train()
        print(result["loss_d"], result["loss_g"])
        images = trainer.apply_all_operators(lambda operator: operator.generate(16))[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from raysgd.errors import ConfigError
from raysgd.operators.image_classification import digits_data
from raysgd.operators.recipe import Recipe

__all__ = ["GANOperator", "digit_images"]


class GANOperator(Recipe):
    """Trains a generator, which turns noise into images, and a discriminator, which distinguishes them from real images.

    Training reports `loss_d` and `loss_g`, and the mean probability that the discriminator gives real and generated
    images, `p_real` and `p_fake` (if both are near 0.5, it cannot distinguish them). Validation reports the same with the
    prefix `val_`. `TrainingOptions(accumulate=...)` is refused.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `generator`, `discriminator`: functions without arguments that return the modules. The generator maps noise
      (n, latent_size) to images, and the discriminator maps images to one logit each (default: two layers each)
    - `train_data`, `validation_data`: a dataset whose samples start with an image, or a function that creates
      it on the worker (default: the 8x8 digits of scikit-learn, in [-1, 1])
    - `latent_size` (32), `lr` (0.0002), `batch_size` per worker (64; a global `BATCH_SIZE` overrides it)
    """

    default_batch_size = 64

    def setup(self, config: Mapping[str, Any]) -> None:
        # Within a window, zero_grad does not discard what the generator's pass has added to the discriminator.
        if self._batches_per_step > 1:
            raise ConfigError(
                f"GANOperator cannot train with accumulate={self._batches_per_step}. The discriminator would step with gradients of the "
                "generator's loss, too. Leave accumulate out, and use larger batches"
            )
        self.latent_size: int = config.get("latent_size", 32)
        train_data, validation_data = self.make_data(config)
        models = self.make_models(config, train_data)
        optimizers = self.make_optimizers(*models, config)
        (self.generator, self.discriminator), (self.optimizer_g, self.optimizer_d) = self.register(
            models=models, optimizers=optimizers
        )
        self.register_data(**self.make_loaders(config, train_data, validation_data))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return digit_images()

    def make_models(self, config: Mapping[str, Any], train_data: Any) -> tuple[nn.Module, nn.Module]:
        """Make the generator and the discriminator."""
        if "generator" in config and "discriminator" in config:
            return config["generator"](), config["discriminator"]()
        shape = train_data[0][0].shape
        generator = nn.Sequential(
            nn.Linear(self.latent_size, 128),
            nn.ReLU(),
            nn.Linear(128, shape.numel()),
            nn.Tanh(),
            nn.Unflatten(1, shape),
        )
        discriminator = nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        return generator, discriminator

    def make_optimizers(
        self, generator: nn.Module, discriminator: nn.Module, config: Mapping[str, Any]
    ) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Make the optimizers of the generator and of the discriminator."""
        lr = config.get("lr", 2e-4)
        return (
            torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.999)),
            torch.optim.Adam(discriminator.parameters(), lr=lr, betas=(0.5, 0.999)),
        )

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        real = batch[0]
        with self.autocast():
            fake = self.generator(self.noise(real))
            loss_d, p_real, p_fake = self.judge(real, fake.detach())
        self.zero_grad(self.optimizer_d)
        self.backward(loss_d)
        self.step(self.optimizer_d)

        with self.autocast():
            loss_g = self.fool(fake)
        self.zero_grad(self.optimizer_g)
        # This adds gradients to the discriminator too. The next zero_grad of its optimizer discards them.
        self.backward(loss_g)
        self.step(self.optimizer_g)
        return {
            "loss_d": loss_d.detach(),
            "loss_g": loss_g.detach(),
            "p_real": p_real,
            "p_fake": p_fake,
            "num_samples": real.size(0),
        }

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        real = batch[0]
        with self.autocast():
            fake = self.generator(self.noise(real))
            loss_d, p_real, p_fake = self.judge(real, fake)
            loss_g = self.fool(fake)
        return {
            "val_loss_d": loss_d,
            "val_loss_g": loss_g,
            "val_p_real": p_real,
            "val_p_fake": p_fake,
            "num_samples": real.size(0),
        }

    def judge(self, real: torch.Tensor, fake: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the discriminator's loss, and the mean probabilities that it gives real and generated images."""
        # One forward pass for both halves: a second one before backward would change buffers that the first one needs.
        logits = self.discriminator(torch.cat([real, fake])).float()
        truth = torch.cat([torch.ones_like(logits[: len(real)]), torch.zeros_like(logits[len(real) :])])
        loss = binary_cross_entropy_with_logits(logits, truth)
        opinion = logits.detach().sigmoid()
        return loss, opinion[: len(real)].mean(), opinion[len(real) :].mean()

    def fool(self, fake: torch.Tensor) -> torch.Tensor:
        """Compute the generator's loss, which is small if the discriminator takes its images for real ones."""
        logits = self.discriminator(fake).float()
        return binary_cross_entropy_with_logits(logits, torch.ones_like(logits))

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.size(0), self.latent_size, device=like.device)

    @torch.no_grad()
    def generate(self, count: int) -> torch.Tensor:
        """Generate new images, on the CPU, from the generator in evaluation mode."""
        training = self.generator.training
        self.generator.eval()
        images = self.generator(self.to_device(torch.randn(count, self.latent_size)))
        self.generator.train(training)
        result: torch.Tensor = images.float().cpu()
        return result


def digit_images() -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's digits as images in [-1, 1], without labels. Every fifth is for validation."""
    train_data, validation_data = digits_data()
    return TensorDataset(2 * train_data.tensors[0] - 1), TensorDataset(2 * validation_data.tensors[0] - 1)

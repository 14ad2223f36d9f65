"""Two models and two optimizers: a small DCGAN learns to draw digits.

`raysgd.operators.gan` shows the loop: both models and both optimizers are registered together, and
`train_batch` steps one after the other. Here the networks are exchanged for convolutional ones and the
optimizers tuned, by overriding one method each. At the end four generated digits are drawn with characters.

    python examples/two_models.py --num-workers 2 --epochs 60
"""

import argparse

import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators.gan import GANOperator

SHADES = " .:-=+*#%@"


class DigitsDCGAN(GANOperator):
    def make_models(self, config, train_data):
        width = config["width"]
        generator = nn.Sequential(
            nn.Unflatten(1, (self.latent_size, 1, 1)),
            nn.ConvTranspose2d(self.latent_size, 2 * width, 2, bias=False),  # 2x2
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 4x4
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),  # 8x8
            nn.Tanh(),
        )
        discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),  # 4x4
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),  # 2x2
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, 1),
        )
        return generator, discriminator

    def make_optimizers(self, generator, discriminator, config):
        return (
            torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        )

    def distance(self):
        """How far the mean generated image is from the mean real one, per pixel."""
        real = torch.stack([image for (image,) in self.make_data(self.config)[1]])
        return (self.generate(len(real)).mean(dim=0) - real.mean(dim=0)).abs().mean().item()


def draw(images):
    """The images side by side, as text."""
    pixels = ((images.squeeze(1) + 1) / 2 * (len(SHADES) - 1)).round().int()
    lines = []
    for row in range(8):
        lines.append("   ".join("".join(SHADES[value] * 2 for value in image[row]) for image in pixels))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs, smaller networks")
    args = parser.parse_args()

    with TorchTrainer(
        training_operator_cls=DigitsDCGAN,
        num_workers=args.num_workers,
        config={"width": 8 if args.smoke else 32, "batch_size": 64 // args.num_workers},
    ) as trainer:
        print(f"before   distance {trainer.apply_all_operators(DigitsDCGAN.distance)[0]:.3f}")
        for _ in range(6 if args.smoke else args.epochs):
            train = trainer.train()
            print(
                f"epoch {train['epoch']:.0f}  loss_d {train['loss_d']:.3f}  loss_g {train['loss_g']:.3f}"
                f"  p_real {train['p_real']:.2f}  p_fake {train['p_fake']:.2f}"
            )
        print(f"after    distance {trainer.apply_all_operators(DigitsDCGAN.distance)[0]:.3f}")
        print(draw(trainer.apply_all_operators(lambda operator: operator.generate(4))[0]))


if __name__ == "__main__":
    main()

"""Denoising diffusion: a small U-Net learns to draw digits, and the workers generate images together.

The data are scikit-learn's handwritten digits.

    python examples/diffusion.py --num-workers 2
"""

import argparse

import torch

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.diffusion import DiffusionOperator

SHADES = " .:-=+*#%@"


def draw(images):
    """Print images side by side."""
    levels = ((images.clamp(-1, 1) + 1) * 4.99).long()
    for row in range(levels.size(2)):
        print("  ".join("".join(SHADES[level] for level in image[0, row].tolist()) for image in levels))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    torch.manual_seed(0)
    with TorchTrainer(
        training_operator_cls=DiffusionOperator,
        num_workers=args.num_workers,
        config={BATCH_SIZE: 32},
    ) as trainer:
        for _ in range(4 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_frechet_distance {val['val_frechet_distance']:.2f}",
                flush=True,
            )
        draw(trainer.predict(torch.randn(8, 1, 8, 8)))


if __name__ == "__main__":
    main()

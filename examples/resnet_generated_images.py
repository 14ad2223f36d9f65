"""A CIFAR-style ResNet on generated images: an established model in the ready-made image operator.

Nothing is downloaded: each class is a wave of its own direction and colour, under noise. With real data, only
`train_data` and `validation_data` change. The batch size is global here: it is divided among the workers.

    python examples/resnet_generated_images.py --num-workers 2
"""

import argparse
import math

import torch
from torch.utils.data import Dataset

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.image_classification import ImageClassificationOperator
from raysgd.operators.resnet import ResNet18

CLASSES = 10


class Waves(Dataset):
    """Images of 3 x size x size; each is generated from its index when it is asked for."""

    def __init__(self, length, *, seed, size=32):
        self.length, self.seed, self.size = length, seed, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        label = index % CLASSES
        angle = math.pi * label / CLASSES
        grid = torch.linspace(-1, 1, self.size)
        slope = math.cos(angle) * grid.unsqueeze(0) + math.sin(angle) * grid.unsqueeze(1)
        phase = 2 * math.pi * torch.rand(1, generator=generator)
        colour = torch.tensor([math.cos(angle), math.cos(angle + 2), math.cos(angle + 4)]).view(3, 1, 1)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return colour * (8 * slope + phase).sin() + 0.3 * noise, label


def same_start():
    """Runs on every worker before `setup`: with it, each run begins with the same weights and order."""
    torch.manual_seed(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--smoke", action="store_true", help="fewer and smaller images")
    args = parser.parse_args()
    images, size = (320, 16) if args.smoke else (args.images, 32)

    config = {
        "model": ResNet18,
        "train_data": Waves(images, seed=1, size=size),
        "validation_data": Waves(images // 4, seed=2, size=size),
        "lr": 0.005,
        BATCH_SIZE: 32,
    }
    with TorchTrainer(
        training_operator_cls=ImageClassificationOperator,
        initialization_hook=same_start,
        num_workers=args.num_workers,
        config=config,
    ) as trainer:
        for _ in range(args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_loss {val['val_loss']:.4f}  val_accuracy {val['val_accuracy']:.3f}"
                f"  val_top5_accuracy {val['val_top5_accuracy']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

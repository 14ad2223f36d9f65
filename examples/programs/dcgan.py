"""A DCGAN that learns to draw rings: two models, two optimizers, and pictures that the first worker writes to files.

python examples/programs/dcgan.py --workers 2
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import PrintCallback
from raysgd.constants import BATCH_SIZE

SIDE = 16


def rings(count):
    """Return pictures of rings, whose places and sizes differ."""
    x, y, radius = torch.rand(3, count, 1, 1, generator=torch.Generator().manual_seed(0)) - 0.5
    grid = torch.linspace(-1, 1, SIDE)
    distances = torch.hypot(grid - x / 2, grid.unsqueeze(1) - y / 2)
    return (2 * torch.exp(-(((distances - 0.5 - radius / 3) / 0.15) ** 2)) - 1).unsqueeze(1)


def networks(noise, width):
    """Return a generator and a discriminator."""
    generator = nn.Sequential(
        nn.Unflatten(1, (noise, 1, 1)),
        *(nn.ConvTranspose2d(noise, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(2 * width, 1, 4), nn.Flatten(0)),
    )
    for module in [*generator, *discriminator]:
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.05)
    return generator, discriminator


def write(path, pictures):
    """Write pictures side by side, as a file that most programs can show."""
    pixels = ((torch.cat([*pictures.squeeze(1)], dim=1) + 1) * 127.5).round().byte()
    path.write_bytes(b"P5 %d %d 255\n" % pixels.shape[::-1] + pixels.numpy().tobytes())


class Rings(TrainingOperator):
    def setup(self, config):
        models = networks(config["noise"], config["width"])
        optimizers = [torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.5, 0.999)) for model in models]
        (self.generator, self.discriminator), (self.g_optimizer, self.d_optimizer), self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=nn.BCEWithLogitsLoss()
        )
        order = torch.Generator().manual_seed(1)
        self.register_data(train_loader=DataLoader(rings(config["rings"]), config[BATCH_SIZE], True, generator=order))
        self.shown = torch.randn(8, config["noise"], device=self.device)

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        if self.world_rank == 0:
            generator = self.unwrapped(self.generator).eval()
            with torch.no_grad():
                write(Path(self.config["pictures"], f"epoch_{epoch_idx + 1}.pgm"), generator(self.shown).cpu())
        return result

    def train_batch(self, real, batch_info):
        drawn = self.generator(torch.randn(len(real), self.config["noise"], device=self.device))
        self.zero_grad(self.d_optimizer)
        d_loss = self.learned(real, 1, self.d_optimizer) + self.learned(drawn.detach(), 0, self.d_optimizer)
        self.step(self.d_optimizer)
        self.zero_grad(self.g_optimizer)
        g_loss = self.learned(drawn, 1, self.g_optimizer)
        self.step(self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def learned(self, pictures, target, optimizer):
        """Compute the gradients of the discriminator's loss for this target. Return the loss."""
        output = self.discriminator(pictures)
        loss = self.criterion(output, torch.full_like(output, target))
        self.backward(loss, optimizer)
        return loss.detach()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"workers": 1, "epochs": 10, "batch": 64, "rings": 2000, "noise": 16, "width": 16, "lr": 1e-3}
    for name, value in {**sizes, "pictures": "pictures"}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args(argv)
    folder = Path(args.pictures).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with TorchTrainer(
        training_operator_cls=Rings,
        num_workers=args.workers,
        config={**vars(args), BATCH_SIZE: args.batch, "pictures": str(folder)},
        seed=0,
        callbacks=[PrintCallback(["d_loss", "g_loss"])],
    ) as trainer:
        return list(trainer.fit(args.epochs, validate_every=0)), trainer.get_model()


if __name__ == "__main__":
    main()

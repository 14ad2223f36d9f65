"""A LightningModule, trained by raysgd: nothing in the module knows of it.

The module is written as for Lightning's own Trainer: steps, `self.log`, a scheduler. `TrainingOperator.from_ptl`
makes an operator class from it; the config's keys become the module's arguments. Needs
`pip install 'raysgd[lightning]'`.

    python examples/lightning_module.py --num-workers 2
"""

import argparse

import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


def two_moons(size, seed):
    """Points on two arcs that reach into each other, with their arc's number."""
    generator = torch.Generator().manual_seed(seed)
    arc = torch.randint(2, (size,), generator=generator)
    angle = torch.pi * torch.rand(size, generator=generator)
    x = torch.stack([angle.cos() + arc, angle.sin() * (1 - 2 * arc) + arc / 2], dim=1)
    return TensorDataset(x + 0.1 * torch.randn(size, 2, generator=generator), arc)


class Moons(LightningModule):
    def __init__(self, lr=0.01, hidden=32, batch_size=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def training_step(self, batch, batch_idx):
        x, arc = batch
        loss = nn.functional.cross_entropy(self.net(x), arc)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, arc = batch
        output = self.net(x)
        right = (output.argmax(dim=1) == arc).float().mean()
        self.log_dict({"val_loss": nn.functional.cross_entropy(output, arc), "val_accuracy": right})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self):
        return DataLoader(two_moons(2000, seed=1), batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(two_moons(500, seed=2), batch_size=self.hparams.batch_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    with TorchTrainer(
        training_operator_cls=TrainingOperator.from_ptl(Moons),
        num_workers=args.num_workers,
        config={"lr": 0.01, "batch_size": 32 // args.num_workers},
    ) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_loss {val['val_loss']:.4f}  val_accuracy {val['val_accuracy']:.3f}"
            )
        module = trainer.get_model()
    print(f"got back a {type(module).__name__} with {sum(each.numel() for each in module.parameters())} weights")


if __name__ == "__main__":
    main()

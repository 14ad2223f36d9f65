"""A script for RaySGD: it trains a LightningModule whose steps return dictionaries. Only its imports have changed."""

import argparse

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator


class LitClassifier(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.Sequential(nn.Linear(4, config["layer_1"]), nn.ReLU(), nn.Linear(config["layer_1"], 2))

    def forward(self, x):
        return self.layers(x)

    def setup(self, stage):
        torch.manual_seed(0)
        x = torch.randn(400, 4)
        self.data = TensorDataset(x, (x.sum(dim=1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.config["batch_size"], shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.config["batch_size"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.config["lr"])

    def _measured(self, batch):
        x, y = batch
        output = self(x)
        return nn.functional.cross_entropy(output, y), (output.argmax(dim=1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, accuracy = self._measured(batch)
        return {"loss": loss, "train_acc": accuracy}

    def validation_step(self, batch, batch_idx):
        loss, accuracy = self._measured(batch)
        return {"val_loss": loss, "val_acc": accuracy}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="no difference: it is small already")
    args = parser.parse_args()

    trainer = TorchTrainer(
        training_operator_cls=TrainingOperator.from_ptl(LitClassifier),
        num_workers=args.num_workers,
        config={"layer_1": 16, "lr": 0.02, "batch_size": 20},
        use_gpu=False,
    )
    for _ in range(3):
        stats = {**trainer.train(), **trainer.validate()}
        print("epoch", stats["epoch"], *(f"{name} {stats[name]:.3f}" for name in ("train_acc", "val_loss", "val_acc")))
    print("module", *trainer.apply_all_operators(lambda operator: type(operator.get_model()).__name__))
    trainer.shutdown()


if __name__ == "__main__":
    main()

"""A LightningModule with a LightningDataModule, which keeps its best checkpoint and tests it. Of raysgd it knows nothing.

torchrun --nproc-per-node 2 -m tests.train.scripts.digits FOLDER
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(pl.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage=None):
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        parts = random_split(data, [512, 256, 256, len(data) - 1024], torch.Generator().manual_seed(0))
        self.train, self.val, self.held_out = parts[:3]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)


class LitDigits(pl.LightningModule):
    def __init__(self, width=32, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.accuracy = nn.ModuleDict(
            {f"{name}_acc": torchmetrics.Accuracy("multiclass", num_classes=10) for name in ("val", "test")}
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        self.accuracy[f"{stage}_acc"](logits, y)
        self.log(f"{stage}_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log(f"{stage}_acc", self.accuracy[f"{stage}_acc"])

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder):
    pl.seed_everything(7)
    best = ModelCheckpoint(Path(folder, "best"), monitor="val_loss", save_top_k=1, save_weights_only=True)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[best, LearningRateMonitor("step")],
        logger=pl.loggers.CSVLogger(folder, version=0),
        gradient_clip_val=1.0,
        log_every_n_steps=4,
        enable_progress_bar=False,
    )
    model = LitDigits()
    trainer.fit(model, datamodule=DigitsData())
    (found,) = trainer.test(datamodule=DigitsData(), ckpt_path="best")
    if trainer.is_global_zero:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        Path(folder, "test.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

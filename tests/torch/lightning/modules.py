"""Small LightningModules for the tests. Import this module only if Lightning is installed."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults import Fault

ROWS, VAL_ROWS = 203, 101


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Net(LightningModule):
    def __init__(self, lr: float = 0.1, hidden: int = 8, batch_size: int = 16, count: int = ROWS) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.calls: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"val_loss": self.loss(batch)}, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(self.hparams.count, seed=0), batch_size=self.hparams.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(VAL_ROWS, seed=1), batch_size=self.hparams.batch_size)


class Scheduled(Net):
    """Has a scheduler that steps after epochs, and one that steps after batches, each with its own frequency."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr / 10)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        by_batch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [by_epoch, {"scheduler": by_batch, "interval": "step", "frequency": 3}]


class Spread(Net):
    """For several workers: prepares data, records its epochs, and fails once at step `fault_at`."""

    def __init__(
        self, folder: str, fault_at: int = -1, val_count: int = VAL_ROWS, batch_size: int = 16, count: int = ROWS
    ) -> None:
        super().__init__(batch_size=batch_size, count=count)
        self.folder, self.fault_at, self.val_count = Path(folder), fault_at, val_count

    def prepare_data(self) -> None:
        time.sleep(0.5)
        with open(self.folder / "prepared", "a", encoding="utf-8") as file:
            file.write(f"{self.global_rank}\n")

    def setup(self, stage: str) -> None:
        assert (self.folder / "prepared").exists(), "setup must not run before prepare_data has ended"

    def on_train_epoch_start(self) -> None:
        self.calls.append(("start", self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.calls.append(("end", self.current_epoch))

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.global_rank == 1 and self.global_step == self.fault_at:
            Fault(1, self.fault_at).fire(str(self.folder))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def val_dataloader(self) -> Any:
        return DataLoader(rows(self.val_count, seed=1), batch_size=8)


HOOKS = """
    prepare_data setup configure_model on_fit_start on_train_start on_train_epoch_start on_train_epoch_end
    on_train_batch_start on_train_batch_end on_before_zero_grad on_before_backward on_after_backward
    on_before_optimizer_step on_validation_start on_validation_end on_validation_epoch_start
    on_validation_epoch_end on_validation_batch_start on_validation_batch_end
"""


class Watched(Net):
    """Records every hook with its epoch and step."""


def _recording(hook: str) -> Any:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append((hook, self.current_epoch, self.global_step))

    return recorded


for _hook in HOOKS.split():
    setattr(Watched, _hook, _recording(_hook))

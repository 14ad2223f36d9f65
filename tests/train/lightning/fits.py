"""A small LightningModule that keeps a record of what its training does, in its weights' checkpoint, and the function that fits it.

python -m tests.train.lightning.fits FOLDER '{"size": 96}'     without raysgd, under torchrun
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import train
from raysgd.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from tests.faults import once, until

Fault = Callable[[str, int], None]
RECORD = ("samples", "rates", "validations", "epochs")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Points(Dataset[Any]):
    def __init__(self, size: int, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 8, generator=generator)
        noise = 0.1 * torch.randn(size, 1, generator=generator)
        self.y = self.x @ torch.arange(8.0).unsqueeze(1) / 8 + noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), self.x[index], self.y[index]


class Recorded(pl.LightningModule):
    """Records the samples and the rate of each step, the validations, and the hooks of epochs."""

    def __init__(self, *, dropout: float = 0.0, witnesses: int = 0, fault: Fault = lambda where, step: None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.witness = nn.Parameter(torch.zeros(witnesses)) if witnesses else None
        self.window: list[int] = []
        self.samples: list[list[int]] = []
        self.rates: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self.epochs: list[tuple[str, int, int]] = []
        self.fault, self.waits = fault, lambda: False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, x, y = batch
        time.sleep(self.waits())
        self.fault("forward", self.trainer.global_step)
        self.window += index.tolist()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.witness is not None:
            mine = self.witness[index]
            loss = loss + (mine - mine.detach()).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault("validation", self.trainer.global_step)
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[1]), batch[2]), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fault("before", self.trainer.global_step)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, self.trainer.callback_metrics["val_loss"].item()))

    def on_train_epoch_start(self) -> None:
        self.epochs.append(("start", self.current_epoch, self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.fault("reported", self.trainer.global_step)
        self.epochs.append(("end", self.current_epoch, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        if self.witness is not None:
            return torch.optim.SGD(self.parameters(), lr=0.0625)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches  # it asks for the loader before Lightning has its state
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        continuation = getattr(self.trainer.strategy, "continuation", None)
        if continuation is not None and not continuation.committing:
            self.fault("save", self.trainer.global_step)
        checkpoint["record"] = {name: list(getattr(self, name)) for name in RECORD}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, value in checkpoint["record"].items():
            setattr(self, name, list(value))


class Data(pl.LightningDataModule):
    def __init__(self, train: DataLoader[Any], held_out: DataLoader[Any]) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out

    def train_dataloader(self) -> DataLoader[Any]:
        return self.train

    def val_dataloader(self) -> DataLoader[Any]:
        return self.held_out


class Ledger(pl.Callback):
    """Notes in the module which samples all ranks have used in each step, and makes a file in `marks` for it."""

    def __init__(self, marks: Path | None) -> None:
        self.marks = marks

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        last = batch_idx + 1 == trainer.num_training_batches
        if not last and (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        pl_module.fault("after", trainer.global_step - 1)
        everybody: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everybody, pl_module.window)
        pl_module.samples.append(sorted(each for window in everybody for each in window))
        pl_module.rates.append(pl_module.optimizers().param_groups[0]["lr"])
        pl_module.window = []
        if self.marks is not None:
            Path(self.marks, f"step{time.time()}").touch()


def fault_of(config: dict[str, Any], harm: Callable[[int], None]) -> Fault:
    """Return a function that harms the process once at each of the (rank, step, place) in `faults`. Ranks with the same step and
    place wait for each other, because one that has lost a peer may not come there."""
    marks = {tuple(each): Path(config["marks"], "{2}-{0}-{1}".format(*each)) for each in config.get("faults", ())}

    def fault(where: str, step: int) -> None:
        for (rank, at, place), mark in marks.items():
            if place == where and rank == train.world_rank() and step >= at and once(mark):
                mark.write_text(json.dumps({"step": step, "world": train.world_size()}))
                together = [other for (_, *when), other in marks.items() if when == [at, place]]
                for _ in until(lambda: all(other.exists() for other in together)):  # noqa: B023, called only here
                    time.sleep(0.002)
                harm(config.get("signal", signal.SIGKILL))

    return fault


def replacement_awaited(marks: Path) -> Callable[[], bool]:
    """Return a function that says whether a fault has happened, and no process has joined since then."""
    begun, joined = marks / f"begun{os.getpid()}", marks / "joined"

    def has_fault() -> bool:
        return any(marks.glob("*-*"))

    if has_fault() and not begun.exists():
        joined.touch()
    begun.touch()
    return lambda: has_fault() and not joined.exists()


def trainer_of(config: dict[str, Any]) -> pl.Trainer:
    """Return Lightning's Trainer, prepared for raysgd, or with `plain` as in a script that torchrun runs."""
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "accelerator": "cpu", **QUIET}
    stopping = [EarlyStopping("val_loss", min_delta=9.0, patience=config["patience"])] if "patience" in config else []
    settings["callbacks"] = [
        Ledger(Path(config["marks"]) if config.get("counted") else None),
        *([RayTrainReportCallback()] if config.get("reports") else []),
        *stopping,
    ]
    settings["callbacks"] += [pl.callbacks.EMAWeightAveraging()] if config.get("averages") else []
    if config.get("best"):
        best = pl.callbacks.ModelCheckpoint(Path(config["marks"], "best"), monitor="val_loss")
        settings |= {"enable_checkpointing": True, "callbacks": [*settings["callbacks"], best]}
    settings |= config.get("trainer", {})
    if config.get("plain"):
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        return pl.Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **settings)
    trainer = pl.Trainer(devices=1, strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], **settings)
    elastic, commit_every = config.get("elastic", True), config.get("commit_every", 1)
    return prepare_trainer(trainer, elastic=elastic, commit_every=commit_every)


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Fit a module, and return its record and its weights."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    fault = fault_of(config, config.get("harm", lambda number: os.kill(os.getpid(), number)))
    module = Recorded(dropout=config.get("dropout", 0.0), witnesses=config.get("witnesses", 0), fault=fault)
    if config.get("waits"):
        module.waits = replacement_awaited(Path(config["marks"]))
    trainer = trainer_of(config)
    size = config.get("size", 96)
    loader: DataLoader[Any] = DataLoader(Points(size), batch_size=4, shuffle=True, **config.get("loader", {}))
    held_out: DataLoader[Any] = DataLoader(Points(24, seed=8), batch_size=4)
    if config.get("around"):
        trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, datamodule=Data(loader, held_out), ckpt_path=config.get("ckpt_path"))
    fault("after the fit", trainer.global_step)
    if config.get("around"):
        trainer.validate(module, held_out, verbose=False)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    saved = trainer.checkpoint_callback
    best = (Path(saved.best_model_path).name, saved.best_model_score.item()) if config.get("best") else ("", 0.0)
    record = {name: getattr(module, name) for name in RECORD}
    return {**record, "weights": weights, "best": best, "steps": trainer.global_step, "world": trainer.world_size}


def assert_equal(found: dict[str, Any], undisturbed: dict[str, Any], *, within: float = 1e-6) -> None:
    """Check that a fit did the same steps, validations and epochs, and ends with the same weights."""
    for name in ("samples", "rates", "epochs", "steps"):
        assert found[name] == undisturbed[name], name
    assert [step for step, _ in found["validations"]] == [step for step, _ in undisturbed["validations"]]
    for (_, loss), (_, expected) in zip(found["validations"], undisturbed["validations"], strict=True):
        assert abs(loss - expected) <= within
    assert found["best"][0] == undisturbed["best"][0]
    assert abs(found["best"][1] - undisturbed["best"][1]) <= within
    for name, value in undisturbed["weights"].items():
        assert (found["weights"][name] - value).abs().max() <= within, name


def main() -> None:
    folder, config = sys.argv[1], json.loads(sys.argv[2])
    found = fit({**config, "plain": True})
    torch.save(found, Path(folder, f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()

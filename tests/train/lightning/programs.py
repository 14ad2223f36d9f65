"""Programs of Lightning's parts, drawn by a seed: schedulers, callbacks, options of the Trainer, and hooks of a module."""

import math
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch import callbacks as given
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from raysgd import train
from raysgd.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from tests.faults import once
from tests.train.events import points_of
from tests.train.lightning.fits import QUIET, Data, Points


class Counting(pl.Callback):
    """A user's callback, which keeps a record of all its hooks in plain attributes."""

    def __init__(self, place: Callable[[], None]) -> None:
        self.place = place
        self.calls, self.seen, self.mean = {}, [], torch.zeros(2)  # type: ignore[var-annotated]

    def _hook(self, name: str, trainer: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.seen.append((name, trainer.current_epoch, trainer.global_step))
            self.mean += torch.randn(2) * 0 + self.calls[name]
            self.place()


def _add_hook(name: str) -> None:
    def hook(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._hook(name, trainer)

    setattr(Counting, name, hook)


for each in (
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
):
    _add_hook(each)


class Thawing(given.BaseFinetuning):
    """Adds a layer to the optimizer after one epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.01)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "StepLR": lambda optimizer: {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5)},
    "StepLR, every second epoch": lambda optimizer: {
        "scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5),
        "frequency": 2,
    },
    "OneCycleLR of steps": lambda optimizer: {
        "scheduler": lr_scheduler.OneCycleLR(optimizer, [0.05] * len(optimizer.param_groups), 40),
        "interval": "step",
    },
    "LambdaLR of steps": lambda optimizer: {
        "scheduler": lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "interval": "step",
        "frequency": 2,
    },
    "SequentialLR": lambda optimizer: {
        "scheduler": lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            milestones=[3],
        ),
        "interval": "step",
    },
    "CosineAnnealingWarmRestarts": lambda optimizer: {
        "scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    },
    "ReduceLROnPlateau of val_loss": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        "monitor": "val_loss",
    },
    "ReduceLROnPlateau of train_loss": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        "monitor": "train_loss_epoch",
    },
    "ReduceLROnPlateau of steps": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5),
        "monitor": "val_loss",
        "strict": False,
        "interval": "step",
        "frequency": 2,
    },
}


def saved(folder: Path, name: str, **settings: Any) -> Any:
    return given.ModelCheckpoint(folder / name, "{epoch}-{step}", **settings)


CALLBACKS: dict[str, Callable[[Path], Any]] = {
    "EarlyStopping": lambda folder: given.EarlyStopping("val_loss", min_delta=0.3, patience=1),
    "EarlyStopping of train_loss": lambda folder: given.EarlyStopping(
        "train_loss_epoch", min_delta=0.3, patience=1, check_on_train_epoch_end=True
    ),
    "EarlyStopping of val_loss after the epoch": lambda folder: given.EarlyStopping(
        "val_loss", min_delta=0.3, patience=1, check_on_train_epoch_end=True
    ),
    "ModelCheckpoint of val_loss": lambda folder: saved(folder, "val", monitor="val_loss", save_top_k=2),
    "ModelCheckpoint of steps": lambda folder: saved(
        folder, "steps", monitor="val_loss", every_n_train_steps=3, save_top_k=2
    ),
    "ModelCheckpoint, last": lambda folder: saved(folder, "last", every_n_epochs=2, save_last=True),
    "ModelCheckpoint after the epoch": lambda folder: saved(
        folder, "end", monitor="train_loss_epoch", save_top_k=-1, save_on_train_epoch_end=True
    ),
    "GradientAccumulationScheduler": lambda folder: given.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
    "BackboneFinetuning": lambda folder: given.BackboneFinetuning(1, lambda epoch: 1.5, verbose=False),
    "BaseFinetuning": lambda folder: Thawing(),
    "LearningRateMonitor": lambda folder: given.LearningRateMonitor("step"),
    "RichProgressBar": lambda folder: given.RichProgressBar(),
    "DeviceStatsMonitor": lambda folder: given.DeviceStatsMonitor(cpu_stats=False),
    "Timer": lambda folder: given.Timer("00:01:00:00"),
    "LambdaCallback": lambda folder: given.LambdaCallback(on_train_epoch_start=lambda trainer, module: None),
    "RayTrainReportCallback": lambda folder: RayTrainReportCallback(),
    "ModelSummary": lambda folder: given.ModelSummary(),
}
if hasattr(given, "EMAWeightAveraging"):
    CALLBACKS["EMAWeightAveraging"] = lambda folder: given.EMAWeightAveraging(decay=0.9)

TRAINERS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "validation within the epoch": {"val_check_interval": 0.5},
    "validation each three batches": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "validation each second epoch": {"check_val_every_n_epoch": 2},
    "fewer batches": {"limit_train_batches": 5},
    "max_steps": {"max_steps": 13, "max_epochs": -1},
    "min_epochs": {"min_epochs": 2},
    "clipping": {"gradient_clip_val": 0.1},
    "bfloat16": {"precision": "bf16-mixed"},
    "no sanity check": {"num_sanity_val_steps": 0},
    "detect_anomaly": {"detect_anomaly": True},
    "overfitting": {"overfit_batches": 4},
}


class Hidden:
    """Cannot be pickled: the module's own hooks keep it."""

    def __init__(self) -> None:
        self.value, self.file = 0, open(os.devnull)  # noqa: SIM115

    def __reduce__(self) -> Any:
        raise TypeError("not picklable")


class Drawn(pl.LightningModule):
    """Has the hooks of the program."""

    def __init__(self, program: dict[str, Any], place: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.program = program
        self.backbone = nn.Sequential(nn.Linear(8, 6), nn.GroupNorm(2, 6), nn.Tanh())
        self.dropout, self.head = nn.Dropout(program["dropout"]), nn.Linear(6, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.teachers = [nn.Linear(6, 1)]  # not registered
        self.count, self.losses = 0, list[torch.Tensor]()
        self.extra = nn.Parameter(torch.ones(()))
        if "hidden" in program["hooks"]:
            self.hidden = Hidden()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, x, y = batch
        hidden = self.dropout(self.backbone(x))
        found = self.head(hidden) * self.scale * self.extra
        if "hidden" in self.program["hooks"]:
            self.hidden.value += 1
        loss = nn.functional.mse_loss(found, y)
        if "skip" in self.program["hooks"] and batch_idx == 2:
            return None
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        hooks = self.program["hooks"]
        if "metric" in hooks:
            self.error(found, y)
            self.log("error", self.error, on_step=False, on_epoch=True)
        if "teacher" in hooks:
            loss = loss + 0.1 * nn.functional.mse_loss(found, self.teachers[0](hidden).detach())
            with torch.no_grad():
                for mine, other in zip(self.teachers[0].parameters(), self.head.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
        if "losses" in hooks:
            self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(
            "val_loss",
            nn.functional.mse_loss(self.head(self.backbone(batch[1])) * self.scale, batch[2]),
            sync_dist=True,
        )

    def on_train_epoch_start(self) -> None:
        hooks, epoch = self.program["hooks"], self.current_epoch
        self.count += 1
        if "requires_grad" in hooks:
            self.backbone[0].requires_grad_(epoch % 2 == 1)
        if "dropout" in hooks:
            self.dropout.p = 0.1 * epoch
        if "group" in hooks and epoch == 1:
            self.optimizers().optimizer.add_param_group({"params": [self.extra], "lr": 0.01})
        if "accumulation" in hooks:
            self.trainer.accumulate_grad_batches = 1 + epoch
        if "eval" in hooks:
            self.backbone[1].train(epoch % 2 == 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        hooks = self.program["hooks"]
        if "stop" in hooks and self.current_epoch == 1 and batch_idx == 2:
            self.trainer.should_stop = True
        if "scale" in hooks:
            self.scale += 0.01 * self.losses[-1] if self.losses else 0.01
        return -1 if "short epoch" in hooks and self.current_epoch == 1 and batch_idx == 3 else None

    def on_train_epoch_end(self) -> None:
        if "rates" in self.program["hooks"]:
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = group["weight_decay"] + 0.01

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if "optimizer_step" in self.program["hooks"] and self.global_step < 9:
            for group in optimizer.param_groups:
                group["lr"] = 0.002 * (self.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.count += 1
        if "lr_scheduler_step" not in self.program["hooks"] or self.count % 2:
            super().lr_scheduler_step(scheduler, metric)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if "clipping" in self.program["hooks"]:
            self.clip_gradients(optimizer, gradient_clip_val=0.5 / (1 + self.current_epoch))
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def configure_callbacks(self) -> Any:
        return [given.EarlyStopping("val_loss", patience=5)] if "configure_callbacks" in self.program["hooks"] else []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "hidden" in self.program["hooks"]:
            checkpoint["hidden"] = self.hidden.value

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "hidden" in self.program["hooks"]:
            self.hidden.value = checkpoint["hidden"]

    def configure_optimizers(self) -> Any:
        kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[self.program["optimizer"]]
        later = [self.extra] if "group" in self.program["hooks"] else []
        trained = [each for each in self.parameters() if each.requires_grad and all(each is not one for one in later)]
        settings: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(trained, lr=0.02, weight_decay=0.0, **settings)
        schedule = SCHEDULERS[self.program["scheduler"]](optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}


HOOKS = [
    *(
        "metric",
        "teacher",
        "losses",
        "requires_grad",
        "dropout",
        "eval",
        "scale",
        "rates",
        "short epoch",
        "stop",
        "skip",
    ),
    *("group", "accumulation", "optimizer_step", "lr_scheduler_step", "clipping", "configure_callbacks", "hidden"),
]


# Schedulers that fail if the optimizer gets a group later.
NEED_ALL_GROUPS = ("OneCycleLR of steps", "SequentialLR", "CosineAnnealingWarmRestarts", "LambdaLR of steps")
# Lightning refuses these together, or fails with them in an undisturbed run.
CONTRADICTIONS = [
    ("GradientAccumulationScheduler", ["accumulation"]),
    ("'hooks': ['group", ["requires_grad", "BackboneFinetuning", "BaseFinetuning", "EMAWeightAveraging"]),
    ("'EarlyStopping", ["configure_callbacks"]),
    ("'EarlyStopping'", ["EarlyStopping of val_loss after the epoch"]),
    ("'EMAWeightAveraging'", ["hidden"]),
    ("overfitting", ["fewer batches"]),
    ("validation each three batches", ["validation within the epoch", "validation each second epoch"]),
    (
        "'ReduceLROnPlateau of val_loss'",
        ["validation each three batches", "validation each second epoch", "short epoch"],
    ),
    ("'ReduceLROnPlateau of train_loss'", ["short epoch"]),
    (
        "'EarlyStopping of val_loss after the epoch'",
        ["validation each three batches", "validation each second epoch", "short epoch"],
    ),
    ("'BackboneFinetuning'", ["BaseFinetuning", "requires_grad"]),
    ("'BaseFinetuning'", ["requires_grad"]),
    ("Finetuning'", ["EMAWeightAveraging"]),
]


def drawn(seed: int) -> dict[str, Any]:
    """Draw a program."""
    choice = random.Random(seed)
    program: dict[str, Any] = {
        "scheduler": choice.choice([*SCHEDULERS]),
        "callbacks": choice.sample([*CALLBACKS], choice.randint(0, 4)),
        "trainer": choice.sample([*TRAINERS], choice.randint(0, 3)),
        "hooks": choice.sample(HOOKS, choice.randint(0, 3)),
        "optimizer": choice.choice(["SGD", "AdamW"]),
        "dropout": choice.choice([0.0, 0.3]),
        "size": choice.choice([24, 29]),
        "every": choice.choice([1, 1, 1, 3]),
        "counting": choice.choice(["first", "last"]),
        "log_every": choice.randint(1, 3),
    }
    grows = "Finetuning'" in str(program["callbacks"]) or "group" in program["hooks"]
    if grows and program["scheduler"] in NEED_ALL_GROUPS:
        program["scheduler"] = "StepLR"
    if "clipping" in program["hooks"]:
        program["trainer"] = [each for each in program["trainer"] if each != "clipping"]
    for one, others in CONTRADICTIONS:
        if one in str(program):
            for name in ("callbacks", "trainer", "hooks"):
                program[name] = [each for each in program[name] if each not in others]
    return program


def fit(program: dict[str, Any], folder: Path, place: Callable[[], None]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    module, counting = Drawn(program, place), Counting(place)
    settings: dict[str, Any] = {**QUIET, "max_epochs": 3, "log_every_n_steps": program["log_every"]}
    for name in program["trainer"]:
        settings |= TRAINERS[name]
    callbacks = [CALLBACKS[name](folder) for name in program["callbacks"]]
    callbacks.insert(0 if program["counting"] == "first" else len(callbacks), counting)
    if any(isinstance(each, given.GradientAccumulationScheduler) for each in callbacks):
        settings.pop("accumulate_grad_batches", None)
    settings["enable_model_summary"] = any(isinstance(each, given.ModelSummary) for each in callbacks)
    settings["enable_progress_bar"] = any(isinstance(each, given.ProgressBar) for each in callbacks)
    settings["enable_checkpointing"] = any(isinstance(each, given.ModelCheckpoint) for each in callbacks)
    trainer = pl.Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        **{**settings, "logger": [CSVLogger(folder / "logs"), TensorBoardLogger(folder / "events")]},
    )
    trainer = prepare_trainer(trainer, commit_every=program["every"])
    loader: DataLoader[Any] = DataLoader(Points(program["size"]), batch_size=4, shuffle=True)
    held_out: DataLoader[Any] = DataLoader(Points(12, seed=8), batch_size=4)
    trainer.fit(module, datamodule=Data(loader, held_out))
    return result_of(trainer, module, counting, folder)


def plain(value: Any) -> Any:
    """Make what can be compared: bytes of tensors, names of files within the folder."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {plain(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value


def numbers_of(table: Path) -> list[list[Any]]:
    names, *rows = [line.split(",") for line in table.read_text().splitlines()]
    return [names, *([float(each) if each else "" for each in row] for row in rows)]  # type: ignore[list-item]


def result_of(trainer: Any, module: Any, counting: Any, folder: Path) -> dict[str, Any]:
    if train.world_size() > 1:
        torch.distributed.barrier()
    own = ("Timer",)
    files = sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "events" not in path.parts
    )
    rows = [numbers_of(path) for path in sorted(folder.glob("logs/**/metrics.csv"))]
    found = {
        "weights": dict(module.state_dict()),
        "others": [
            module.scale,
            getattr(module, "hidden", module).__dict__.get("value"),
            *module.teachers[0].parameters(),
            module.count,
            module.losses,
            module.dropout.p,
        ],
        "modes": [each.training for each in module.modules()],
        "requires_grad": [each.requires_grad for each in module.parameters()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "callbacks": {
            each.state_key: each.state_dict() for each in trainer.callbacks if type(each).__name__ not in own
        },
        "calls": counting.calls,
        "seen": counting.seen,
        "mean": counting.mean,
        "metrics": {name: value for name, value in trainer.callback_metrics.items()},
        "rows": rows,
        "points": points_of(folder / "events"),
        "files": [str(path) for path in files],
        "steps": trainer.global_step,
        "saved": {
            str(path): torch.load(folder / path, weights_only=False)["state_dict"]
            for path in files
            if path.suffix == ".ckpt"
        },
    }
    return {name: plain(value) for name, value in found.items()}


def fit_with_kills(config: dict[str, Any]) -> dict[str, Any]:
    """Fit on workers. Each of `kills` is a rank and a number: after so many places of an attempt, that rank is killed once. They
    happen in their order."""
    places, folder = 0, Path(config["folder"])

    def place() -> None:
        nonlocal places
        places += 1
        happened = len([*folder.glob("killed-*")])
        for rank, number in config["kills"][happened : happened + 1]:
            if rank == train.world_rank() and places >= number and once(folder / f"killed-{happened}"):
                os.kill(os.getpid(), signal.SIGKILL)

    return fit(config["program"], folder / "fit", place)


def distance(found: Any, expected: Any) -> float:
    """Return the largest difference of two numbers in equal places, and infinity if anything else differs."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return max((distance(found[name], each) for name, each in expected.items()), default=0.0)
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(found) == len(expected):
        return max(map(distance, found, expected), default=0.0)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(found - expected) if found == found or expected == expected else 0.0
    return 0.0 if found == expected else math.inf

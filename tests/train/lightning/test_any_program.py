"""Any program of Lightning's parts, stopped anywhere, ends as one that was not stopped: weights, optimizers, schedulers, callbacks,
logged points and files. The parts are the rows of `ROWS`, which docs/from_lightning.md has as a table."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch import callbacks as given
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from raysgd.train.elastic_state import Commit
from raysgd.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from raysgd.train.session_functions import Stopped, running
from tests.tiers import NIGHTLY
from tests.train.lightning.fits import QUIET, Data, Points
from tests.train.lightning.test_continuation import Recording

pytestmark = pytest.mark.usefixtures("group")


class Stopper:
    """Counts the places of a run, and stops the function at some of them."""

    def __init__(self, *stops: int) -> None:
        self.stops, self.places = {*stops}, 0

    def __call__(self) -> None:
        self.places += 1
        if self.places in self.stops:
            raise Stopped(asked=False)


class Counting(pl.Callback):
    """A user's callback, which keeps a record of all its hooks in plain attributes."""

    def __init__(self, place: Callable[[], None]) -> None:
        vars(self)["place"] = place
        self.calls, self.seen, self.mean = {}, [], torch.zeros(2)  # type: ignore[var-annotated]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "place"}

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
}


class Any_(pl.LightningModule):
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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, x, y = batch
        hidden = self.dropout(self.backbone(x))
        found = self.head(hidden) * self.scale
        loss = nn.functional.mse_loss(found, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
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
        self.log("val_loss", nn.functional.mse_loss(self.head(self.backbone(batch[1])) * self.scale, batch[2]))

    def on_train_epoch_start(self) -> None:
        hooks, epoch = self.program["hooks"], self.current_epoch
        self.count += 1
        if "requires_grad" in hooks:
            self.backbone[0].requires_grad_(epoch % 2 == 1)
        if "dropout" in hooks:
            self.dropout.p = 0.1 * epoch
        if "group" in hooks and epoch == 1:
            self.optimizers().optimizer.add_param_group({"params": [self.extra], "lr": 0.01})
        if "eval" in hooks:
            self.backbone[1].train(epoch % 2 == 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        hooks = self.program["hooks"]
        if "scale" in hooks:
            self.scale += 0.01 * self.losses[-1] if self.losses else 0.01
        return -1 if "short epoch" in hooks and self.current_epoch == 1 and batch_idx == 3 else None

    def on_train_epoch_end(self) -> None:
        if "rates" in self.program["hooks"]:
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = group["weight_decay"] + 0.01

    def configure_optimizers(self) -> Any:
        kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[self.program["optimizer"]]
        trained = [each for each in self.parameters() if each.requires_grad]
        settings: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(trained, lr=0.02, weight_decay=0.0, **settings)
        schedule = SCHEDULERS[self.program["scheduler"]](optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}


HOOKS = ["metric", "teacher", "losses", "requires_grad", "dropout", "eval", "scale", "rates", "short epoch"]


# Lightning refuses these together, or fails with them in an undisturbed run.
CONTRADICTIONS = [
    ("GradientAccumulationScheduler", ["accumulation"]),
    ("validation each three batches", ["validation within the epoch", "validation each second epoch"]),
    ("'ReduceLROnPlateau of val_loss'", ["validation each three batches", "validation each second epoch", "short epoch"]),
    ("'ReduceLROnPlateau of train_loss'", ["short epoch"]),
    ("'EarlyStopping of val_loss after the epoch'", ["validation each three batches", "validation each second epoch", "short epoch"]),
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
    if "Finetuning'" in str(program) and program["scheduler"] in ("OneCycleLR of steps", "SequentialLR", "CosineAnnealingWarmRestarts", "LambdaLR of steps"):
        program["scheduler"] = "StepLR"
    for one, others in CONTRADICTIONS:
        if one in str(program):
            for name in ("callbacks", "trainer", "hooks"):
                program[name] = [each for each in program[name] if each not in others]
    return program


def fit(program: dict[str, Any], folder: Path, place: Callable[[], None]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    module, counting = Any_(program, place), Counting(place)
    settings: dict[str, Any] = {**QUIET, "max_epochs": 3, "log_every_n_steps": program["log_every"]}
    for name in program["trainer"]:
        settings |= TRAINERS[name]
    callbacks = [CALLBACKS[name](folder) for name in program["callbacks"]]
    callbacks.insert(0 if program["counting"] == "first" else len(callbacks), counting)
    if any(isinstance(each, given.GradientAccumulationScheduler) for each in callbacks):
        settings.pop("accumulate_grad_batches", None)
    settings["enable_model_summary"] = any(isinstance(each, given.ModelSummary) for each in callbacks)
    settings["enable_checkpointing"] = any(isinstance(each, given.ModelCheckpoint) for each in callbacks)
    trainer = pl.Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        **{**settings, "logger": CSVLogger(folder / "logs")},
    )
    trainer = prepare_trainer(trainer, commit_every=program["every"])
    loader: DataLoader[Any] = DataLoader(Points(program["size"]), batch_size=4, shuffle=True)
    held_out: DataLoader[Any] = DataLoader(Points(8, seed=8), batch_size=4)
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


def result_of(trainer: Any, module: Any, counting: Any, folder: Path) -> dict[str, Any]:
    own = ("Timer",)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    rows = [path.read_text().splitlines() for path in sorted(folder.glob("logs/**/metrics.csv"))]
    found = {
        "weights": dict(module.state_dict()),
        "others": [module.scale, *module.teachers[0].parameters(), module.count, module.losses, module.dropout.p],
        "modes": [each.training for each in module.modules()],
        "requires_grad": [each.requires_grad for each in module.parameters()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks if type(each).__name__ not in own},
        "calls": counting.calls,
        "seen": counting.seen,
        "mean": counting.mean,
        "metrics": {name: value for name, value in trainer.callback_metrics.items()},
        "rows": rows,
        "files": [str(path) for path in files],
        "steps": trainer.global_step,
        "saved": {str(path): torch.load(folder / path, weights_only=False)["state_dict"] for path in files if path.suffix == ".ckpt"},
    }
    return {name: plain(value) for name, value in found.items()}


def attempts(program: dict[str, Any], folder: Path, place: Stopper) -> tuple[dict[str, Any], int]:
    commit, rounds, number = Commit(), list[Any](), 0
    folder.mkdir()
    while True:
        number += 1
        try:
            with running(Recording(commit, rounds)):
                return {**fit(program, folder, place), "rounds": [(row["epoch"], row["step"]) for row, _ in rounds]}, number
        except Stopped:
            continue


def differences(seed: int, folder: Path) -> list[str]:
    """Return the names of results that differ after one to three stops."""
    program = drawn(seed)
    counted = Stopper()
    undisturbed, _ = attempts(program, folder / "undisturbed", counted)
    choice = random.Random(seed + 1)
    stops = Stopper(*choice.sample(range(1, counted.places + 1), choice.randint(1, 3)))
    found, number = attempts(program, folder / "stopped", stops)
    assert number == len(stops.stops) + 1
    return [name for name, value in undisturbed.items() if found[name] != value]


@pytest.mark.parametrize("seed", range(300 if NIGHTLY else 30))
def test_a_program_that_is_stopped_ends_as_one_that_is_not(seed: int, tmp_path: Path) -> None:
    assert differences(seed, tmp_path) == []

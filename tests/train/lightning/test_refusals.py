"""What a fit cannot continue with, or raysgd's workers cannot run, is refused with an alternative."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler
from torchmetrics.classification import BinaryAUROC

from raysgd import ConfigError
from raysgd.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)
from raysgd.train.sessions import OutsideSession, running
from tests.train.lightning.fits import QUIET, Points, Recorded

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def session() -> Any:
    with running(OutsideSession()):
        yield


def trainer_of(**settings: Any) -> Any:
    given = {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()], "accelerator": "cpu", "devices": 1}
    return pl.Trainer(**{**given, **QUIET, "max_epochs": 1, "limit_train_batches": 1, **settings})


class ByHand(Recorded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByIterator(Recorded):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Sharded(Recorded):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class Outside(Recorded):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class Averaged(Recorded):
    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(0.1)]


def with_callback(name: str, *given: Any, **settings: Any) -> Callable[[], Any]:
    class Given(Recorded):
        def configure_callbacks(self) -> Any:
            return [getattr(pl.callbacks, name)(*given, **settings)]

    return Given


class Own(BatchSampler):
    """Has the arguments with which Lightning makes it again."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Points(8))


def points(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Points(8), **{"batch_size": 4, **settings})


# Of the Trainer: where it runs, what it shows, and options of other calls.
NOT_TRAINING = {
    *("accelerator", "strategy", "devices", "num_nodes", "plugins", "callbacks", "inference_mode", "profiler"),
    *("limit_test_batches", "limit_predict_batches", "enable_progress_bar", "enable_model_summary"),
    *("default_root_dir", "enable_autolog_hparams", "model_registry"),
}
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "manual optimization": (ByHand, points),
    r"training_step\(dataloader_iter\)": (ByIterator, points),
    "an optimizer whose state is sharded": (Sharded, points),
    "an optimizer of parameters that are not the module's": (Outside, points),
    "StochasticWeightAveraging": (Averaged, points),
    "LearningRateFinder": (with_callback("LearningRateFinder"), points),
    "ModelPruning": (with_callback("ModelPruning", "l1_unstructured", amount=0.5), points),
    "OnExceptionCheckpoint": (with_callback("OnExceptionCheckpoint", "."), points),
    "SpikeDetection": (with_callback("SpikeDetection"), points),
    "several train loaders or a second fit": (Recorded, lambda: CombinedLoader([points(), points()])),
}


@pytest.mark.parametrize("found", REFUSED)
def test_a_fit_that_cannot_continue(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # OnExceptionCheckpoint writes a file
    make, load = REFUSED[found]
    trainer = prepare_trainer(trainer_of())
    with pytest.raises(ConfigError, match=f"cannot continue.*{found}.*elastic=False"):
        trainer.fit(make(), load())


LOADERS: dict[str, Callable[[], Any]] = {
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "sampler": lambda: points(sampler=WeightedRandomSampler([1.0] * 8, 8)),
    "no batches": lambda: points(batch_size=None),
    "batch sampler": lambda: DataLoader(Points(8), batch_sampler=Own(SequentialSampler(Points(8)), 4, False)),
    "list": lambda: [points(), points()],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_train_loader_that_cannot_continue(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"this train loader|several train loaders"):
        prepare_trainer(trainer_of()).fit(Recorded(), LOADERS[kind]())


def test_fp16_whose_steps_would_overflow_elsewhere() -> None:
    plugins = [RayLightningEnvironment(), MixedPrecision("16-mixed", "cpu")]
    with pytest.raises(ConfigError, match=r"16-mixed.*bf16-mixed"):
        prepare_trainer(trainer_of(plugins=plugins)).fit(Recorded(), points())


@pytest.mark.parametrize(("thresholds", "is_refused"), [(None, True), (20, False)])
def test_a_metric_that_gathers_samples(thresholds: int | None, is_refused: bool) -> None:
    class Ranked(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.auroc = BinaryAUROC(thresholds=thresholds)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.auroc.update(torch.sigmoid(batch[2]), batch[0] % 2)
            return super().training_step(batch, batch_idx)

    trainer = prepare_trainer(trainer_of(limit_train_batches=2))
    if not is_refused:
        trainer.fit(Ranked(), points())
        return
    with pytest.raises(ConfigError, match=r"auroc, BinaryAUROC, in training_step.*validation.*thresholds"):
        trainer.fit(Ranked(), points())


def test_a_validation_by_the_clock() -> None:
    with pytest.raises(ConfigError, match="val_check_interval as a time"):
        prepare_trainer(trainer_of(val_check_interval="00:00:01:00", limit_train_batches=1.0)).fit(Recorded(), points())


def test_the_page_names_each_part_of_lightning() -> None:
    page = Path("docs/from_lightning.md").read_text(encoding="utf-8")
    hooks = [name for kind in (pl.Callback, ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)]
    other = (
        "validation",
        "test",
        "predict",
        "sanity_check",
        "fit_end",
        "train_end",
        "sharded",
        "transfer",
        "state_key",
    )
    names = [name for name in hooks if not name.startswith("_") and not any(each in name for each in other)]
    options = {*inspect.signature(pl.Trainer).parameters} - NOT_TRAINING
    missing = [each for each in [*pl.callbacks.__all__, *options, *names] if f"`{each}" not in page]
    assert missing == []


def test_reloaded_loaders() -> None:
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs"):
        prepare_trainer(trainer_of(reload_dataloaders_every_n_epochs=1))


def test_commit_every() -> None:
    with pytest.raises(ConfigError, match="commit_every must be a whole number of at least 1, got 0"):
        prepare_trainer(trainer_of(), commit_every=0)


def test_what_is_not_prepared_for_workers() -> None:
    with pytest.raises(ConfigError, match="RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy, got Single"):
        prepare_trainer(pl.Trainer(accelerator="cpu", devices=1, **QUIET))
    with pytest.raises(ConfigError, match="RayLightningEnvironment"):
        prepare_trainer(trainer_of(plugins=[]))

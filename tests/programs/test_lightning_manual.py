"""The LightningModule with manual optimization ends with the weights that it has under Lightning's own Trainer, on one
worker and on two (DDP), and logs the same figures."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.programs import by_hand

pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

# On two workers, the last step of an epoch has 12 rows for each: Lightning does not weight unequal parts.
SMALL = {"epochs": 3, "rows": 408, "batch": 16}
NAMES = (("train_error", "train_loss", "lr"), ("val_error", "val_loss", "val_accuracy"))


def by_lightning(rank: int, workers: int, epochs: int, rows: int, batch: int) -> tuple[list[Any], dict[str, Any]]:
    """Return what the module has logged in each training and validation, and its weights."""
    from lightning import Trainer
    from lightning.pytorch.loggers.logger import DummyLogger

    program = import_module("examples.programs.lightning_manual")
    logged: list[dict[str, float]] = [{} for _ in range(epochs)]

    class Logger(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged[int(metrics["epoch"])].update(metrics)

    class Divided(program.CodedCurves):  # type: ignore[misc, name-defined]
        def loader(self, data: Any, size: int, sampler: Any, generator: torch.Generator | None = None) -> Any:
            share = by_hand.Share(sampler, size * workers, rank, workers)
            return DataLoader(data, batch_sampler=share, generator=generator)

        def train_dataloader(self) -> Any:
            data, draw = program.curves(rows, seed=1), torch.Generator().manual_seed(3)
            return self.loader(data, batch, RandomSampler(data, generator=draw), draw)

        def val_dataloader(self) -> Any:
            return self.loader(program.curves(200, seed=2), 50, range(200))

    module = Divided(rows, batch)
    how: dict[str, Any] = {"devices": workers, "accelerator": "cpu", "use_distributed_sampler": False}
    if workers > 1:
        os.environ["LOCAL_RANK"] = str(rank)  # so that Lightning takes this process as one of several
        how["strategy"] = "ddp_find_unused_parameters_true"
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_epochs=epochs, logger=Logger(), num_sanity_val_steps=0, **how, **quiet).fit(module)
    return [{name: epoch[name] for name in names} for epoch in logged for names in NAMES], module.state_dict()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.more)])
def test_equal_to_lightning(workers: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if workers > 1:
        request.getfixturevalue("ray_cluster")
    settings = {"workers": workers, **SMALL}
    history, module = import_module("examples.programs.lightning_manual").main(by_hand.arguments(settings))
    figures, weights = by_hand.run(by_lightning, tmp_path, settings) if workers > 1 else by_lightning(0, **settings)
    by_hand.assert_equal(history, figures)
    by_hand.assert_equal_weights(module, weights)

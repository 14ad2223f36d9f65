"""A LightningModule makes its optimizer's steps itself, and no step acts on gradients that an abort has cut off."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.emulated.runs import Ground, Kill, loader, model_of, trainer

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.usefixtures("ray_cluster")]

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = model_of({})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.model(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return loader()


def test_a_kill_in_a_lightning_modules_step() -> None:
    from raysgd.torch import TrainingOperator

    buckets = {"ddp_args": {"bucket_cap_mb": 1e-4}}  # three of them
    with trainer(operator=TrainingOperator.from_ptl(Module), **buckets) as run:
        ground = Ground(run, 3)
        ground.restore()
        ground.lay(Kill(number=3 * 3 + 1, step=None))
        run.train()
        found, (recovery,) = ground.states(), run.recoveries
        assert recovery.in_place and recovery.batches_redone == 0 and len(found) == 2
        ground.restore()  # each worker keeps its batch, so the same change of workers is made without a failure
        ground.lay()
        run.train(num_steps=recovery.batch)
        run.resize(2)
        run.train()
        for mine, expected in zip(found, ground.states(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)

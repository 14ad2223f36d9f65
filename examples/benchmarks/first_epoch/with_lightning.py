"""Lightning, on two processes of torchrun's: one call of `fit` with one epoch in it."""

import lightning
import torch
from torch.utils.data import DataLoader
from workloads import WORKLOADS

WORKLOAD = WORKLOADS["tiny"].shortened(50)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = WORKLOAD.model()

    def training_step(self, batch, batch_idx):
        features, target = batch
        return WORKLOAD.criterion(self.model(features), target)

    def configure_optimizers(self):
        return WORKLOAD.optimizer(self.model)


torch.set_num_threads(1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(WORKLOAD.dataset(2), batch_size=WORKLOAD.batch_size, shuffle=True))
if trainer.is_global_zero:
    print("first epoch done", flush=True)

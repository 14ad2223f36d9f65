"""Lightning: a module, and a trainer without what it can do without (logger, checkpoints, bar, summary)."""

import os

import lightning
import torch
from gate import Gate
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from workloads import Setting


class Module(lightning.LightningModule):
    def __init__(self, setting):
        super().__init__()
        self.workload = setting.workload
        self.model, self.criterion = setting.workload.model(), setting.workload.criterion

    def training_step(self, batch, batch_idx):
        features, target = batch
        return self.criterion(self.model(features), target)

    def configure_optimizers(self):
        return self.workload.optimizer(self.model)


class Turns(lightning.Callback):
    """At the beginning of every epoch: the last one is over, with all that Lightning does around it."""

    def __init__(self):
        self.gate = Gate()

    def on_train_epoch_start(self, trainer, module):
        if not self.gate.wait():
            os._exit(0)


setting = Setting.of_environment()
torch.set_num_threads(1)
workload = setting.workload
loader = DataLoader(workload.dataset(setting.workers), batch_size=workload.batch_size, shuffle=True)
lightning.Trainer(
    accelerator="cpu",
    devices=setting.workers,
    strategy=DDPStrategy(gradient_as_bucket_view=True) if setting.workers > 1 else "auto",
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Turns()],
).fit(Module(setting), loader)

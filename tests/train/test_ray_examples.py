"""The examples of Ray Train's documentation for Trainers, with tiny data and models. Only the name of the package is replaced."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytestmark = [pytest.mark.elastic, pytest.mark.more]

# https://docs.ray.io/en/latest/train/getting-started-transformers.html
TRANSFORMERS = """
import os
import numpy as np
import torch
from transformers import Trainer, TrainingArguments, AutoModelForSequenceClassification, BertConfig
import ray.train.huggingface.transformers
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train_func():
    def tokens(seed):
        random = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, 64, (32, 8), generator=random)
        return [{"input_ids": row, "labels": row[0] % 5} for row in rows]

    small_train_dataset, small_eval_dataset = tokens(1), tokens(2)
    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=5
    )
    model = AutoModelForSequenceClassification.from_config(config)

    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        predictions = np.argmax(logits, axis=-1)
        return {"accuracy": (predictions == labels).mean()}

    training_args = TrainingArguments(
        output_dir=os.path.join(FOLDER, "test_trainer"),
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=small_train_dataset,
        eval_dataset=small_eval_dataset,
        compute_metrics=compute_metrics,
    )
    callback = ray.train.huggingface.transformers.RayTrainReportCallback()
    trainer.add_callback(callback)
    trainer = ray.train.huggingface.transformers.prepare_trainer(trainer)
    trainer.train()

ray_trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=FOLDER),
)
result: ray.train.Result = ray_trainer.fit()

with result.checkpoint.as_directory() as checkpoint_dir:
    checkpoint_path = os.path.join(
        checkpoint_dir,
        ray.train.huggingface.transformers.RayTrainReportCallback.CHECKPOINT_NAME,
    )
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint_path)
"""

# https://docs.ray.io/en/latest/train/getting-started-pytorch-lightning.html
LIGHTNING = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl
import ray.train.lightning
from ray.train.torch import TorchTrainer

class ImageClassifier(pl.LightningModule):
    def __init__(self):
        super(ImageClassifier, self).__init__()
        self.model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(10))
        self.model(torch.zeros(1, 1, 8, 8))
        self.criterion = torch.nn.CrossEntropyLoss()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.forward(x)
        loss = self.criterion(outputs, y)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.001)

def train_func():
    random = torch.Generator().manual_seed(1)
    train_data = TensorDataset(torch.randn(64, 1, 8, 8, generator=random), torch.arange(64) % 10)
    train_dataloader = DataLoader(train_data, batch_size=8, shuffle=True)
    model = ImageClassifier()
    trainer = pl.Trainer(
        max_epochs=3,
        devices="auto",
        accelerator="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[ray.train.lightning.RayTrainReportCallback()],
        enable_checkpointing=False,
        default_root_dir=FOLDER,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    trainer.fit(model, train_dataloaders=train_dataloader)

scaling_config = ray.train.ScalingConfig(num_workers=2)
trainer = TorchTrainer(
    train_func,
    scaling_config=scaling_config,
    run_config=ray.train.RunConfig(storage_path=FOLDER),
)
result: ray.train.Result = trainer.fit()

with result.checkpoint.as_directory() as checkpoint_dir:
    model = ImageClassifier.load_from_checkpoint(
        os.path.join(checkpoint_dir, ray.train.lightning.RayTrainReportCallback.CHECKPOINT_NAME),
    )
"""


def run_example(text: str, folder: Path) -> dict[str, Any]:
    names = {"__name__": "example", "FOLDER": str(folder)}
    exec(text.replace("ray.train", "raysgd.train").replace(" ray.", " raysgd."), names)
    return names


def test_transformers(ray_cluster: None, tmp_path: Path) -> None:
    found = run_example(TRANSFORMERS, tmp_path)
    metrics = found["result"].metrics
    assert (metrics["epoch"], metrics["step"]) == (3, 6)
    assert {"eval_loss", "eval_accuracy"} <= {*metrics}
    assert found["model"].num_labels == 5


def test_lightning(ray_cluster: None, tmp_path: Path) -> None:
    found = run_example(LIGHTNING, tmp_path)
    metrics = found["result"].metrics
    assert (metrics["epoch"], metrics["step"]) == (2, 12)
    assert metrics["loss"] > 0
    assert found["model"].model[-1].in_features == 144

"""The ready-made image operator: it learns the digits, measures accuracy, and accepts other models and data."""

import sys
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators.image_classification import (
    ImageClassificationOperator,
    SmallConvNet,
    digits_data,
    topk_accuracy,
)


def test_learns_the_digits() -> None:
    with TorchTrainer(training_operator_cls=ImageClassificationOperator) as trainer:
        train = [trainer.train() for _ in range(2)]
        val = trainer.validate()
    assert train[1]["train_loss"] < train[0]["train_loss"] / 2
    assert train[1]["train_accuracy"] > train[0]["train_accuracy"]
    assert train[0]["num_samples"] + val["num_samples"] == 1797
    assert 0.85 < val["val_accuracy"] <= val["val_top5_accuracy"] <= 1


def test_topk_accuracy() -> None:
    logits = torch.tensor([[9.0, 8, 7, 0, 0, 0], [0, 0, 0, 1, 2, 3], [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]])
    labels = torch.tensor([0, 4, 5, 1])
    assert topk_accuracy(logits, labels, k=1).item() == 0.25
    assert topk_accuracy(logits, labels, k=2).item() == 0.5
    assert topk_accuracy(logits, labels, k=5).item() == 0.75
    assert topk_accuracy(logits[:, :3], torch.zeros(4, dtype=torch.long), k=5).item() == 1, (
        "there are only three classes"
    )


def test_model_data_scheduler_and_loader_can_be_configured() -> None:
    images = torch.rand(40, 3, 12, 12)
    labels = (images.mean(dim=(1, 2, 3)) > 0.5).long()
    config = {
        "model": partial(SmallConvNet, channels=3, classes=2),
        "train_data": lambda: TensorDataset(images, labels),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
        "lr": 0.5,
        "loader": {"drop_last": True},
    }
    with TorchTrainer(
        training_operator_cls=ImageClassificationOperator, config=config, scheduler_step_freq="epoch"
    ) as trainer:
        assert trainer.train()["num_samples"] == 32, "drop_last leaves 32 of 40"
        rates = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
        assert trainer.get_model().classify.out_features == 2
    assert rates == pytest.approx([0.05])


def test_without_scikit_learn_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        digits_data()

"""The ready-made image operator: it learns the digits, measures accuracy, and accepts other models and data."""

import sys
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from raysgd import ConfigError, TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.image_classification import ImageClassificationOperator, SmallConvNet, digits_data, topk_accuracy
from raysgd.operators.resnet import BasicBlock, ResNet
from tests.local.group import Cluster


def test_learns_the_digits() -> None:
    torch.manual_seed(0)
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


def in_colour(image: torch.Tensor) -> torch.Tensor:
    return image.expand(3, 8, 8)


def shifted(image: torch.Tensor) -> torch.Tensor:
    """An augmentation: the image moves by up to one pixel."""
    down, across = torch.randint(-1, 2, (2,)).tolist()
    return in_colour(image.roll((down, across), (1, 2)))


def rate_of(trainer: TorchTrainer) -> float:
    rates: list[float] = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    return rates[0]


@pytest.mark.more
def test_the_complete_recipe_trains_a_residual_network() -> None:
    torch.manual_seed(0)
    config = {
        "model": partial(ResNet, BasicBlock, (1, 1, 0, 0)),
        "train_transform": shifted,
        "validation_transform": in_colour,
        "mixup": 0.2,
        "label_smoothing": 0.1,
        "weight_decay": 1e-4,
        "lr": 0.1,
        "epochs": 5,
        "warmup": 0.2,  # the first epoch
    }
    with TorchTrainer(
        training_operator_cls=ImageClassificationOperator,
        config=config,
        scheduler_step_freq="batch",
    ) as trainer:
        rates = [rate_of(trainer)]
        for _ in range(5):
            trainer.train()
            rates.append(rate_of(trainer))
        val = trainer.validate()
    assert rates[0] < rates[1] > rates[2] > rates[5] and rates[5] < 0.01, "a warm-up in the first epoch, then a cosine"
    assert val["val_accuracy"] > 0.95 and val["val_top5_accuracy"] > 0.995


def test_augmentation_does_not_depend_on_the_workers() -> None:
    """The images of a training on two workers are those of a training on one, and so are the weights."""
    config = {"model": partial(SmallConvNet, channels=3), "train_transform": shifted, BATCH_SIZE: 64, "lr": 0.1}
    weights = []
    for workers in (1, 2):
        with (
            Cluster(),
            TorchTrainer(
                training_operator_cls=ImageClassificationOperator, config=config, num_workers=workers, seed=0
            ) as trainer,
        ):
            trainer.train(num_steps=5)
            weights.append(trainer.get_model().state_dict())
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


def halves(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shares = torch.nn.functional.one_hot(labels, 10).float()
    return (images + images.roll(1, 0)) / 2, (3 * shares + shares.roll(1, 0)) / 4


def test_mixup() -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 3, 4, 5])
    with TorchTrainer(training_operator_cls=ImageClassificationOperator, config={"mixup": 1.0}) as trainer:
        mixed, shares = trainer.get_local_operator().mix(images, labels)
        assert trainer.train()["train_accuracy"] > 0.2, "of the most probable class"
    share = shares[0, 0]
    assert 0 < share < 1 and torch.equal(shares.sum(dim=1), torch.ones(6)) and shares[0, 5] == 1 - share
    assert torch.allclose(mixed, share * images + (1 - share) * images.flip(0))
    with TorchTrainer(training_operator_cls=ImageClassificationOperator, config={"mixup": halves}) as trainer:
        assert torch.equal(trainer.get_local_operator().mix(images, labels)[0], halves(images, labels)[0])
        assert trainer.train()["train_loss"] > 0.4, "the entropy of a quarter and three quarters is 0.56"


def test_two_schedules_are_refused() -> None:
    config = {"epochs": 2, "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)}
    with pytest.raises(ConfigError, match="pass one of them"):
        TorchTrainer(training_operator_cls=ImageClassificationOperator, config=config, scheduler_step_freq="batch")


def test_without_timm_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"'resnet18'.*pip install 'raysgd\[operators\]'"):
        TorchTrainer(training_operator_cls=ImageClassificationOperator, config={"model": "resnet18"})


def test_a_model_and_the_mixup_of_timm() -> None:
    try:
        import timm.data
    except Exception as error:  # torchvision's wheels raise a RuntimeError beside another build of torch
        pytest.skip(f"timm cannot be imported: {error}")
    config = {
        "model": "resnet10t",
        "model_options": {"in_chans": 3},
        "train_transform": shifted,
        "validation_transform": in_colour,
        "mixup": timm.data.Mixup(mixup_alpha=0.2, num_classes=10, label_smoothing=0.0),
        "loader": {"drop_last": True},
        "lr": 0.02,
    }
    with TorchTrainer(training_operator_cls=ImageClassificationOperator, config=config) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(2)]
        assert losses[1] < losses[0]
        assert trainer.get_model().num_classes == 10

"""What is not supported raises an error that names it, and says what to do instead."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from tests.replicas import operator_alone  # noqa: E402
from tests.torch.lightning.modules import Net, Plateau, rows  # noqa: E402


def trainer_of(module_cls):
    return TorchTrainer(training_operator_cls=TrainingOperator.from_ptl(module_cls), config={})


@pytest.mark.parametrize("given", [nn.Linear, 3, "Net"])
def test_not_a_lightning_module(given):
    with pytest.raises(ConfigError, match="from_ptl takes a"):
        TrainingOperator.from_ptl(given)


def test_a_module_object_instead_of_its_class():
    with pytest.raises(ConfigError, match="an object of type Net"):
        TrainingOperator.from_ptl(Net())


def test_data_modules_and_several_loaders():
    loader = DataLoader(rows(8, 0))
    with pytest.raises(ConfigError, match="train_dataloader is a LightningDataModule"):
        TrainingOperator.from_ptl(Net, lightning.LightningDataModule())
    with pytest.raises(ConfigError, match="val_dataloader gives 2 loaders"):
        TrainingOperator.from_ptl(Net, loader, [loader, loader])


def plateau_by_step(self):
    answer = Plateau.configure_optimizers(self)
    by_step = {"scheduler": answer["lr_scheduler"], "interval": "step", "monitor": "val_loss"}
    return {**answer, "lr_scheduler": by_step}


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("on_train_end", lambda self: None, "overrides on_train_end"),
        ("configure_callbacks", lambda self: [], "overrides configure_callbacks"),
        ("training_step", lightning.LightningModule.training_step, "has no training_step"),
        ("training_step", lambda self, dataloader_iter: None, "dataloader_iter"),
        ("configure_optimizers", lambda self: None, "configure_optimizers returned None"),
        ("configure_optimizers", plateau_by_step, "interval='step' is not supported"),
        ("configure_optimizers", lambda self: self.trainer.max_epochs, "trainer.max_epochs does not exist"),
    ],
)
def test_refused_at_the_start(hook, function, message):
    module_cls = type("Refused", (Net,), {hook: function})
    with pytest.raises((ConfigError, AttributeError), match=message):
        trainer_of(module_cls)


def stop(self):
    self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("training_step", lambda self, batch: {"other": 1}, "must return the loss"),
        ("training_step", lambda self, batch: self.log("a", torch.ones(2)), "a tensor of shape"),
        ("training_step", lambda self, batch: self.log("a", 1, reduce_fx="max"), "reduce_fx='max'"),
        ("optimizer_step", lambda self, *args: None, "did not call its closure"),
        ("on_train_epoch_start", stop, "should_stop is not supported"),
    ],
)
def test_refused_while_training(hook, function, message):
    module_cls = type("Refused", (Net,), {hook: function})
    with trainer_of(module_cls) as trainer, pytest.raises(ConfigError, match=message):
        trainer.train()


def test_validation_needs_its_step():
    module_cls = type("Half", (Net,), {"validation_step": lightning.LightningModule.validation_step})
    with trainer_of(module_cls) as trainer, pytest.raises(ConfigError, match="validation_step in Half"):
        trainer.validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 2}, "from_ptl='Net' and accumulate=2 cannot be combined"),
        ({"parallel": "fsdp"}, "parallel='fsdp' cannot be combined"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm=1.0 and clip_value=1.0 cannot be combined"),
    ],
)
def test_refused_keywords(options, message):
    with pytest.raises(ConfigError, match=message):
        operator_alone(TrainingOperator.from_ptl(Net), options=TrainingOptions(**options))


def test_manual_optimization():
    by_hand = type("ByHand", (Net,), {"automatic_optimization": False})
    with pytest.raises(ConfigError, match=r"ByHand.automatic_optimization is False.*use Lightning's Trainer"):
        trainer_of(by_hand)

"""What is not supported raises an error that names it, and says what to do instead."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.torch.lightning.module import UNSUPPORTED  # noqa: E402
from tests.replicas import operator_alone  # noqa: E402
from tests.torch.lightning.modules import Net, rows  # noqa: E402

INSTEAD = "use Lightning's own Trainer in a training function"


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
    with pytest.raises(ConfigError, match=f"val_dataloader is a list, and from_ptl takes one loader: {INSTEAD}"):
        TrainingOperator.from_ptl(Net, loader, [loader, loader])


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def two_optimizers(self):
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        *(
            (dict.fromkeys([hook]), rf"Refused has {hook}, which from_ptl does not support: {INSTEAD}")
            for hook in UNSUPPORTED
        ),
        ({"backward": None, "optimizer_step": None}, "Refused has backward, optimizer_step, which"),
        (
            {"training_step": lambda self, dataloader_iter: None},
            rf"has training_step\(dataloader_iter\), .*: {INSTEAD}",
        ),
        ({"automatic_optimization": False}, rf"Refused has automatic_optimization = False, .*: {INSTEAD}"),
        ({"training_step": lightning.LightningModule.training_step}, "has no training_step"),
        ({"configure_optimizers": lambda self: None}, "configure_optimizers returned None"),
        (
            {"configure_optimizers": two_optimizers},
            rf"(?s)configure_optimizers returned .*SGD.* does not support .*: {INSTEAD}",
        ),
        ({"configure_optimizers": plateau}, rf"has ReduceLROnPlateau, .*: {INSTEAD}"),
        ({"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())}, rf"has LBFGS, .*: {INSTEAD}"),
        (
            {"configure_optimizers": lambda self: self.trainer.max_epochs},
            rf"trainer.max_epochs does not exist, .*{INSTEAD}",
        ),
        ({"configure_optimizers": lambda self: self.optimizers()}, rf"trainer.strategy does not exist, .*{INSTEAD}"),
    ],
)
def test_refused_at_the_start(members, message):
    own = {name: (lambda self, *_: None) if member is None else member for name, member in members.items()}
    module_cls = type("Refused", (Net,), own)
    with pytest.raises((ConfigError, AttributeError), match=message):
        trainer_of(module_cls)


def stop(self):
    self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("training_step", lambda self, batch: {"other": 1}, "must return the loss"),
        (
            "training_step",
            lambda self, batch: None,
            rf"must return the loss, .* got None. To leave out a batch, {INSTEAD}",
        ),
        ("training_step", lambda self, batch: self.log("a", torch.ones(2)), "a tensor of shape"),
        (
            "training_step",
            lambda self, batch: self.log("a", nn.Identity()),
            rf"got Identity\(\). For metric objects, {INSTEAD}",
        ),
        ("training_step", lambda self, batch: self.log("a", 1, reduce_fx="max"), rf"reduce_fx='max'.*{INSTEAD}"),
        ("on_train_batch_start", lambda self, *_: -1, rf"on_train_batch_start has returned -1, .*: {INSTEAD}"),
        ("on_train_epoch_start", stop, rf"should_stop is not supported, .* {INSTEAD}"),
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

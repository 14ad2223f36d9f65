"""The Lightning operator's reports, state and epochs, with one worker in this process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from tests.torch.lightning import modules  # noqa: E402
from tests.torch.lightning.modules import Net, rows  # noqa: E402


def trainer_of(module_cls, config=None, **loaders):
    return TorchTrainer(training_operator_cls=TrainingOperator.from_ptl(module_cls, **loaders), config=config or {})


# -- the config, the data --------------------------------------------------------------------------------


def test_config_values_become_arguments_of_the_same_name():
    with trainer_of(Net, {"hidden": 5, "lr": 0.25, "something": "else"}) as trainer:
        assert trainer.get_model().net[0].out_features == 5
        assert trainer.get_model().hparams.lr == 0.25


def test_a_module_can_take_the_complete_config():
    class Whole(Net):
        def __init__(self, config):
            super().__init__(hidden=config["width"])

    with trainer_of(Whole, {"width": 4}) as trainer:
        assert trainer.get_model().net[0].out_features == 4


def test_a_missing_argument_is_named():
    class Needy(Net):
        def __init__(self, depth):
            super().__init__()

    with pytest.raises(ConfigError, match=r"needs \['depth'\].*\['lr'\]"):
        trainer_of(Needy, {"lr": 1.0})


def test_passed_loaders_override_the_modules_own():
    train, val = DataLoader(rows(40, 2), batch_size=8), DataLoader(rows(9, 3), batch_size=8)
    with trainer_of(Net, train_dataloader=train, val_dataloader=[val]) as trainer:
        assert trainer.train()["num_samples"] == 40
        assert trainer.validate()["num_samples"] == 9


# -- what is reported --------------------------------------------------------------------------------------


def test_logged_values_are_means_over_samples():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("size", float(len(batch[0])), on_step=True, on_epoch=False)
            return {"loss": self.loss(batch), "other": 1}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("index", batch_idx)
            assert not outputs["loss"].requires_grad and outputs["other"] == 1

        def on_train_epoch_end(self):
            self.log("epoch_was", self.current_epoch)

    with trainer_of(Logs, {"batch_size": 150}) as trainer:
        result = trainer.train()
    assert result["size"] == pytest.approx((150 * 150 + 53 * 53) / 203)
    assert result["last_size"] == 53
    assert result["index"] == pytest.approx(53 / 203)
    assert result["epoch_was"] == 0
    assert result["train_loss"] > 0, "the loss is reported, also when the module does not log it"


def test_a_logged_batch_size_is_the_number_of_samples():
    class Counts(Net):
        def training_step(self, batch, batch_idx):
            self.log("twice", 1.0, batch_size=2 * len(batch[0]))
            return self.loss(batch)

    with trainer_of(Counts) as trainer:
        assert trainer.train()["num_samples"] == 2 * modules.ROWS


def test_frozen_parts_stay_in_eval_mode():
    class Frozen(Net):
        def on_train_start(self):
            self.net[1].eval()

        def validation_step(self, batch, batch_idx):
            assert not self.training and not torch.is_grad_enabled()

        def training_step(self, batch, batch_idx):
            assert self.training and not self.net[1].training
            return self.loss(batch)

    with trainer_of(Frozen) as trainer:
        trainer.train()
        trainer.validate()
        trainer.train()


# -- epochs ------------------------------------------------------------------------------------------------


class Epochs(Net):
    def on_train_epoch_start(self):
        self.calls.append(("start", self.current_epoch))

    def on_train_epoch_end(self):
        self.calls.append(("end", self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self.calls.append(batch_idx)


def test_epoch_hooks_run_once_for_any_number_of_steps():
    with trainer_of(Epochs, {"batch_size": 80}) as trainer:
        for steps in (2, 2, 2):
            trainer.train(num_steps=steps)
        calls = trainer.get_local_operator().module.calls
    assert calls == [("start", 0), 0, 1, 2, ("end", 0), ("start", 1), 0, 1, 2, ("end", 1)]


# -- state -------------------------------------------------------------------------------------------------


class Stateful(modules.Scheduled):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = [checkpoint["epoch"], len(self.calls)]

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["seen"]

    def on_train_epoch_start(self):
        self.calls.append(self.current_epoch)


def test_training_continues_from_a_checkpoint_with_the_same_weights(tmp_path):
    with trainer_of(Stateful) as trainer:
        trainer.train(num_steps=17)
        trainer.save(tmp_path / "module.pt")
        trainer.train(num_steps=17)
        expected = trainer.get_model().state_dict()
    with trainer_of(Stateful) as trainer:
        trainer.load(tmp_path / "module.pt")
        assert trainer.get_local_operator().module.loaded == [1, 2]
        trainer.train(num_steps=17)
        actual = trainer.get_model().state_dict()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


# -- precision, and the older package ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_hooks_see_unscaled_gradients_in_every_precision(precision):
    class Looks(Net):
        def on_before_optimizer_step(self, optimizer):
            self.log("norm", nn.utils.get_total_norm([each.grad for each in self.parameters()]))

    operator_cls = TrainingOperator.from_ptl(Looks)
    with TorchTrainer(training_operator_cls=operator_cls, config={}) as trainer:
        full = trainer.train()
    with TorchTrainer(
        training_operator_cls=operator_cls, config={}, options=TrainingOptions(precision=precision)
    ) as trainer:
        half = trainer.train()
    assert half["norm"] == pytest.approx(full["norm"], rel=0.05)
    assert half["train_loss"] == pytest.approx(full["train_loss"], rel=0.05)
    assert half["train_loss"] != full["train_loss"]


def test_pytorch_lightning_is_supported():
    old = pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning beside lightning")
    own = {name: value for name, value in vars(Net).items() if name in ("loss", "training_step", "train_dataloader")}

    class Old(old.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"batch_size": 16, "count": 203})
            self.net = nn.Linear(6, 2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with trainer_of(type("OldNet", (Old,), own)) as trainer:
        assert trainer.train()["num_samples"] == 203


class ByDictionary(Net):
    """Logs nothing, and returns what it measures, as modules did before `self.log`."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.net(x)
        accuracy = (output.argmax(1) == y).float().mean()
        return {"loss": self.loss(batch), "train_acc": accuracy, "size": len(y), "predictions": output, "note": "text"}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": self.loss(batch), "val_acc": (self.net(x).argmax(1) == y).float().mean()}


def test_numbers_in_a_steps_dictionary_are_reported():
    with trainer_of(ByDictionary, {"batch_size": 150}) as trainer:
        trained, validated = trainer.train(), trainer.validate()
        model = trainer.get_model()
    assert trained.keys() == {
        *("epoch", "batch_count", "num_samples", "train_loss", "last_train_loss"),
        *("train_acc", "last_train_acc", "size", "last_size"),
    }
    assert trained["size"] == pytest.approx((150 * 150 + 53 * 53) / 203)
    assert validated.keys() == {*("batch_count", "num_samples", "val_loss", "last_val_loss", "val_acc", "last_val_acc")}
    x, y = rows(modules.VAL_ROWS, seed=1).tensors
    with torch.no_grad():
        assert validated["val_acc"] == pytest.approx((model.net(x).argmax(1) == y).float().mean().item(), abs=1e-6)
        assert validated["val_loss"] == pytest.approx(nn.functional.cross_entropy(model.net(x), y).item(), rel=1e-5)


def test_raysgds_names_for_the_parts():
    with trainer_of(modules.Scheduled) as trainer:
        operator = trainer.get_local_operator()
        assert operator.get_model() is operator.model is operator.module
        assert [type(each).__name__ for each in operator.optimizers] == ["AdamW"]
        assert [type(each).__name__ for each in operator.schedulers] == ["ExponentialLR", "LambdaLR"]
        first, second = operator.scheduler_dicts
        assert [first["scheduler"], second["scheduler"]] == operator.schedulers
        keys = ("interval", "frequency", "reduce_on_plateau", "monitor")
        assert [[each[key] for key in keys] for each in (first, second)] == [
            ["epoch", 1, False, None],
            ["step", 3, False, None],
        ]
        with pytest.raises(AttributeError):
            operator.model = None

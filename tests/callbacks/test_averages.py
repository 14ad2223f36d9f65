"""EMA equals a hand-written average of the weights: in validation, predict, checkpoints, and after recoveries."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, CheckpointError, ConfigError, TrainingOptions
from raysgd.callbacks import EMA, LearningRateMonitor
from raysgd.torch import TorchTrainer
from tests.faults import LedgerOperator
from tests.local.ground import Fault, LocalGround
from tests.local.group import Cluster
from tests.peek import parts_of
from tests.torch.small import Line, inline, operator_of, rows, weights

DECAY = 0.8


def by_hand(steps: int, accumulate: int = 1) -> tuple[torch.Tensor, nn.Module]:
    """Return the weights and the averaged model after the same training in a hand-written loop over 3 batches per epoch."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    batches = list(DataLoader(TensorDataset(*rows(12)), batch_size=4 * accumulate))
    averaged: nn.Module | None = None
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if averaged is None:
            averaged = copy.deepcopy(model)
            continue
        for average, weight in zip(averaged.parameters(), model.parameters(), strict=True):
            average.data = DECAY * average.data + (1 - DECAY) * weight.data
    assert averaged is not None
    return nn.utils.parameters_to_vector(model.parameters()).detach(), averaged


def averaged(trainer: TorchTrainer) -> torch.Tensor:
    return nn.utils.parameters_to_vector(trainer.get_model(averaged=True).parameters()).detach()


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_validation_and_predict_use_the_averages_and_training_does_not() -> None:
    x, y = rows(12)
    with inline(callbacks=[EMA(DECAY)]) as trainer:
        trainer.train()
        live, expected = by_hand(3)
        losses = [
            float(nn.functional.mse_loss(expected(part), y[at : at + 4]).detach()) for at, part in enumerate_by_four(x)
        ]
        assert trainer.validate()["val_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
        torch.testing.assert_close(trainer.predict(TensorDataset(x, y)), expected(x).detach())
        torch.testing.assert_close(averaged(trainer), vector(expected))
        assert torch.equal(weights(trainer), live), "bitwise: training continues with the weights"
        trainer.train()
        live, expected = by_hand(6)
        assert torch.equal(weights(trainer), live)
        torch.testing.assert_close(averaged(trainer), vector(expected))
        assert not torch.allclose(vector(expected), live, rtol=1e-3), "or the test shows nothing"


def enumerate_by_four(x: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(at, x[at : at + 4]) for at in range(0, len(x), 4)]


def test_an_accumulation_window_is_one_step_of_the_average() -> None:
    with inline(config={"batch": 2}, options=TrainingOptions(accumulate=2), callbacks=[EMA(DECAY)]) as trainer:
        trainer.train()
        live, expected = by_hand(3)
        torch.testing.assert_close(weights(trainer), live)
        torch.testing.assert_close(averaged(trainer), vector(expected))


def test_before_the_first_step_the_averages_are_the_weights() -> None:
    with inline(callbacks=[EMA(DECAY)]) as trainer:
        assert torch.equal(averaged(trainer), weights(trainer))


def test_a_validation_that_fails_leaves_the_weights() -> None:
    class Fails(Line):
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError("planned")

    with inline(Fails, callbacks=[EMA(DECAY)]) as trainer:
        trainer.train()
        with pytest.raises(ZeroDivisionError):
            trainer.validate()
        assert torch.equal(weights(trainer), by_hand(3)[0])


class Two(Line):
    """Two models with an optimizer each. The second one steps in every other batch only."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (1 + at)) for at, model in enumerate(models)]
        self.models, self.optimizers, self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=nn.MSELoss()
        )
        self.register_data(**self.loaders(config))
        self.hand = [[], []]  # type: ignore[var-annotated]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        for at, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if at and batch_info["batch_idx"] % 2:
                continue
            self.zero_grad(optimizer)
            self.backward(self.criterion(model(x), y))
            self.step(optimizer)
            now = vector(model).clone()
            self.hand[at] = now if len(self.hand[at]) == 0 else DECAY * self.hand[at] + (1 - DECAY) * now
        return {}


def test_each_optimizers_steps_average_its_own_weights() -> None:
    with inline(Two, callbacks=[EMA(DECAY)]) as trainer:
        trainer.train()
        for model, hand in zip(trainer.get_model(averaged=True), operator_of(trainer).hand, strict=True):
            torch.testing.assert_close(vector(model), hand)


def test_checkpoints_contain_the_averages(tmp_path: Path) -> None:
    with inline(callbacks=[EMA(DECAY)]) as trainer:
        trainer.train()
        path, state = trainer.save(tmp_path / "one.pt"), trainer.state_dict()
        kept = averaged(trainer)
    assert set(state["averages"][0]) == {"weight", "bias"}
    with inline(callbacks=[EMA(DECAY)]) as trainer:
        trainer.load(path)
        assert torch.equal(averaged(trainer), kept)
        trainer.train()
        torch.testing.assert_close(averaged(trainer), vector(by_hand(6)[1]))
        damaged = {**state, "averages": [{"weight": torch.ones(7)}]}
        before = averaged(trainer)
        with pytest.raises(CheckpointError, match=r"the average of model 0: weight has shape \(1, 2\) here and \(7,\)"):
            trainer.load_state_dict(damaged)
        with pytest.raises(CheckpointError, match="the checkpoint's averaged weights are not those of 1 models"):
            trainer.load_state_dict({**state, "averages": []})
        with pytest.raises(CheckpointError, match=r"model 0 has no weights \['other'\]"):
            trainer.load_state_dict({**state, "averages": [{"other": torch.ones(1)}]})
        assert torch.equal(averaged(trainer), before)
        trainer.load_state_dict({name: value for name, value in state.items() if name != "averages"})
        assert torch.equal(averaged(trainer), weights(trainer)), "without averages they begin again"
    with inline() as trainer:
        trainer.load(path)
        assert torch.equal(weights(trainer), by_hand(3)[0]), "a trainer without EMA ignores them"


def test_a_resumed_trainer_has_the_averages(tmp_path: Path) -> None:
    for epochs in (1, 2):
        with inline(
            callbacks=[EMA(DECAY)], checkpoints=AutoCheckpoint(path=str(tmp_path / "auto")), resume="auto"
        ) as trainer:
            trainer.fit(epochs)
            torch.testing.assert_close(averaged(trainer), vector(by_hand(3 * epochs)[1]))


@pytest.mark.parametrize("decay", [1, True, "0.9", float("nan")])
def test_wrong_decays(decay: Any) -> None:
    with pytest.raises(ConfigError, match="decay must be a number of at least 0 and below 1"):
        EMA(decay)


def test_what_cannot_be_averaged_is_refused() -> None:
    class Plain:
        def __init__(self, model: nn.Module) -> None:
            self.param_groups = [{"params": list(model.parameters())}]

        def step(self) -> None: ...

    class Own(Line):
        def setup(self, config: dict[str, Any]) -> None:
            model = nn.Linear(2, 1)
            self.register(models=model, optimizers=Plain(model))

    with pytest.raises(ConfigError, match="got a Plain, which has no register_step_post_hook"):
        inline(Own, callbacks=[EMA()])
    with pytest.raises(ConfigError, match=r"callbacks can have one EMA, got 2, with decay=0\.9 and 0\.99"):
        inline(callbacks=[EMA(0.9), EMA(0.99)])
    with inline() as trainer, pytest.raises(ConfigError, match=r"create the trainer with callbacks=\[EMA"):
        trainer.get_model(averaged=True)


class HandAveraged(LedgerOperator):
    """Averages its weights by hand, too, and carries that average in its own state."""

    hand: torch.Tensor | None = None

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        now = vector(self._parts.models[0])
        self.hand = now.clone() if self.hand is None else DECAY * self.hand + (1 - DECAY) * now
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hand": self.hand}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.hand = state_dict["hand"]


def both_averages(operator: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (values,) = parts_of(operator).averages.state()
    return torch.cat([each.flatten() for each in values.values()]).detach().clone(), operator.hand.clone()


def test_survivors_and_replacements_have_the_same_averages(tmp_path: Path) -> None:
    with Cluster():
        ground = LocalGround(
            tmp_path / "marks", operator=HandAveraged, num_workers=2, config={"samples": 48}, callbacks=[EMA(DECAY)]
        )
        ground.arm(Fault(0, 3))
        ground.trainer.train()
        assert ground.fired() == 1
        ground.assert_epoch_exact()
        ground.whole_again(2)
        ground.trainer.train(num_steps=2)
        found = ground.trainer.apply_all_operators(both_averages)
        assert len(found) == 2
        for average, hand in found:
            torch.testing.assert_close(average, hand, rtol=1e-12, atol=1e-12)
            assert torch.equal(average, found[0][0]), "bitwise the same on all ranks"
        torch.testing.assert_close(averaged(ground.trainer), found[0][0])
        assert not torch.equal(averaged(ground.trainer), weights(ground.trainer))
        ground.trainer.shutdown()


class Overflowing(Line):
    """All steps have infinite gradients, so a GradScaler skips them; a fused optimizer does so within `step`."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({})
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=config["fused"])
        self.model, self.optimizer, self.criterion = self.register(
            models=self.model, optimizers=optimizer, criterion=self.criterion
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        self.zero_grad()
        self.backward(loss * float("inf"))
        self.step()
        return {"own": 1.0}


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_no_steps_of_the_average(fused: bool) -> None:
    options = TrainingOptions(precision="fp16")
    callbacks = [EMA(decay=0.5), LearningRateMonitor()]
    with inline(Overflowing, config={"fused": fused}, options=options, callbacks=callbacks) as trainer:
        result = trainer.train()
        assert result["skipped_steps"] == 3 and "lr" not in result
        assert trainer.state_dict()["averages"] == [{}]

"""Options that act in `self.step` are refused in batches that step their optimizer themselves, and so is a precision that they ignore."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from raysgd import ConfigError, TrainingOptions
from tests.torch.small import Line, inline, set_scale, weights


class Direct(Line):
    """Calls torch's own methods, as most code that is moved here does."""

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        with self.forward():
            loss = self.criterion(self.model(x), y)
        self.optimizer.zero_grad()
        self.update(loss)
        return {"train_loss": loss.detach(), "num_samples": len(x)}

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()


class Cast(Direct):
    def forward(self) -> AbstractContextManager[Any]:
        return self.autocast()


class Helped(Cast):
    def update(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.step()


class WithScaler(Cast):
    """Uses RaySGD's name of the scaler."""

    def update(self, loss: torch.Tensor) -> None:
        self._amp_scaler.scale(loss).backward()
        self._amp_scaler.step(self.optimizer)
        self._amp_scaler.update()


class WithClosure(Direct):
    def update(self, loss: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            loss.backward()
            return loss

        self.optimizer.step(closure)


class OnlyBackward(Cast):
    def update(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.optimizer.step()


class OnlyStep(Cast):
    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.step()


class NoCast(Direct):
    def update(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.step()


def trained(operator: type[Line], **options: Any) -> torch.Tensor:
    with inline(operator, options=TrainingOptions(**options)) as trainer:
        set_scale(trainer, 64.0)
        trainer.train()
        return weights(trainer)


class Adapting(Helped):
    """Steps in a validation too, as code does that adapts to new data."""

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            return self.train_batch(batch, batch_info)


class AdaptingDirectly(Direct):
    validate_batch = Adapting.validate_batch


@pytest.mark.parametrize(
    ("operator", "given", "says"),
    [
        (Direct, {"clip_norm": 0.01}, r"clip_norm=0.01 acts in self.step\(\)"),
        (Direct, {"clip_value": 0.01}, "clip_value=0.01"),
        (Direct, {"accumulate": 2}, "accumulate=2"),
        (Direct, {"on_nonfinite": "skip"}, "on_nonfinite='skip'"),
        (WithScaler, {"precision": "fp16", "clip_norm": 0.01}, "clip_norm=0.01"),
        (WithClosure, {"clip_norm": 0.01}, "passes a closure"),
    ],
)
def test_an_option_that_acts_in_self_step_is_refused_in_a_step_of_the_users(
    operator: type[Line], given: dict[str, Any], says: str
) -> None:
    with inline(operator, options=TrainingOptions(**given)) as trainer:
        set_scale(trainer, 64.0)
        before = weights(trainer)
        with pytest.raises(ConfigError, match=says) as caught:
            trainer.train()
        assert torch.equal(weights(trainer), before)
    lines = "    self.zero_grad()\n    self.backward(loss)\n    self.step()\n"
    assert (lines in str(caught.value)) == (operator is not WithClosure)


def test_an_option_acts_in_steps_that_a_validation_makes() -> None:
    with inline(Adapting, options=TrainingOptions(clip_value=1e-6)) as trainer:
        before = weights(trainer)
        trainer.validate()
        assert 0 < (weights(trainer) - before).abs().max() < 1e-5
    with (
        inline(AdaptingDirectly, options=TrainingOptions(clip_value=1e-6)) as trainer,
        pytest.raises(ConfigError, match="clip_value"),
    ):
        trainer.validate()


def test_a_direct_zero_grad_within_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"self\.zero_grad\(\)"):
        trained(NoCast, accumulate=2)


def test_without_options_direct_steps_and_closures_train_as_before() -> None:
    assert torch.equal(trained(Direct), trained(Helped)) and torch.equal(trained(WithClosure), trained(Helped))


class Accumulating(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


class Counting(Accumulating):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self._counted = batch_info["batch_idx"] + 1
        return super().train_batch(batch, batch_info)


def test_a_counter_of_the_operators_own_changes_no_gradient() -> None:
    assert torch.equal(trained(Counting, accumulate=2), trained(Accumulating, accumulate=2))


def test_bf16_with_direct_calls_equals_bf16_with_the_helpers() -> None:
    assert torch.equal(trained(Cast, precision="bf16"), trained(Helped, precision="bf16"))
    assert not torch.equal(trained(Cast, precision="bf16"), trained(Direct))


@pytest.mark.parametrize(
    ("operator", "precision", "says"),
    [
        (Direct, "bf16", "precision='bf16' was passed, but this operator computes its loss outside self.autocast()"),
        (NoCast, "fp16", "precision='fp16' was passed, but this operator computes its loss outside self.autocast()"),
        (Cast, "fp16", r"calls loss\.backward\(\) itself, .* Call self\.backward\(loss\) and self\.step\(optimizer\)"),
        (OnlyStep, "fp16", r"calls loss\.backward\(\) itself"),
        (OnlyBackward, "fp16", r"calls optimizer\.step\(\) itself"),
    ],
)
def test_a_precision_that_the_batch_ignores_is_refused(operator: type[Line], precision: Any, says: str) -> None:
    with inline(operator, options=TrainingOptions(precision=precision)) as trainer:
        before = weights(trainer)
        trainer.validate()  # does not hide it
        with pytest.raises(ConfigError, match=says):
            trainer.train()
        assert torch.equal(weights(trainer), before)

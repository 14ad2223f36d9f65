"""Clipping and precision hold for, or are refused in, batches that call `backward` and `step` themselves."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from raysgd import ConfigError, TrainingOptions
from tests.torch.small import Line, inline, set_scale, weights

STEP = {"clip_norm": 0.01, "clip_value": 0.005}


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


@pytest.mark.parametrize("option", STEP)
@pytest.mark.parametrize("operator", [Direct, WithClosure])
def test_gradients_are_clipped_before_a_step_of_the_users(operator: type[Line], option: str) -> None:
    given: Any = {option: STEP[option]}
    assert torch.equal(trained(operator, **given), trained(Helped, **given))
    assert not torch.allclose(trained(operator, **given), trained(operator), atol=1e-2)


def test_the_users_scaler_clips_unscaled_gradients() -> None:
    clipped = trained(WithScaler, precision="fp16", clip_norm=0.01)
    assert torch.allclose(clipped, trained(Helped, precision="fp16", clip_norm=0.01), atol=1e-5)
    assert not torch.allclose(clipped, trained(WithScaler, precision="fp16"), atol=1e-2)


def test_bf16_with_direct_calls_equals_bf16_with_the_helpers() -> None:
    assert torch.equal(trained(Cast, precision="bf16"), trained(Helped, precision="bf16"))
    assert not torch.equal(trained(Cast, precision="bf16"), trained(Direct))


@pytest.mark.parametrize(
    ("operator", "precision", "says"),
    [
        (Direct, "bf16", "precision='bf16' was passed, but this operator computes its loss outside self.autocast()"),
        (NoCast, "fp16", "precision='fp16' was passed, but this operator computes its loss outside self.autocast()"),
        (Cast, "fp16", r"calls loss\.backward\(\) itself, .* call self\.backward\(loss\) and self\.step\(optimizer\)"),
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

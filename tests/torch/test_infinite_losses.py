"""A loss that is not finite is one warning in each call, unless `on_nonfinite` handles it. Weights that are not are seen when a
checkpoint is made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import AutoCheckpoint, TrainingOptions
from tests.torch.small import Line, inline


class Explodes(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        loss = self.criterion(self.model(x), y) * (float("nan") if batch_info["global_step"] == 1 else 1.0)
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"train_loss": loss.detach(), "rare": float("nan")}


def found(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records]


def test_a_loss_that_is_not_finite_is_one_warning_in_each_call(caplog: pytest.LogCaptureFixture) -> None:
    with inline(Explodes) as trainer:
        trainer.train(num_steps=1)
        assert not found(caplog), "only losses count"
        trainer.train()
        assert len(found(caplog)) == 1 and "on_nonfinite='raise'" in found(caplog)[0]
        trainer.validate()
        trainer.train()
        assert [each.partition(" in ")[0] for each in found(caplog)] == ["train_loss is nan"] * 2


@pytest.mark.parametrize("action", ["skip", None])
def test_on_nonfinite_and_finite_losses_are_quiet(action: Any, caplog: pytest.LogCaptureFixture) -> None:
    operator = Explodes if action else Line
    with inline(operator, options=TrainingOptions(on_nonfinite=action)) as trainer:
        trainer.train()
        assert torch.cat([each.flatten() for each in trainer.get_model().parameters()]).isfinite().all()
    assert not found(caplog)


class EndsBadly(Line):
    """The gradients of the last batch of the second epoch are infinite, and its loss is not."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] == 5:
            self.model.bias.register_hook(lambda gradient: gradient / 0.0)
        return super().train_batch(batch, batch_info)


def test_a_checkpoint_of_weights_that_are_not_finite_replaces_none_that_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = AutoCheckpoint(path=tmp_path / "run", keep=1)
    with inline(EndsBadly, checkpoints=checkpoints) as trainer:
        history = trainer.fit(2, 0)
    assert all(row["train_loss"] < 2 for row in history)
    (warning,) = [each for each in found(caplog) if "although no loss" in each]
    assert warning.startswith("bias has elements that are infinite or NaN")
    kept = [
        torch.load(each)["models"][0]["bias"].isfinite().all().item()
        for each in sorted((tmp_path / "run").glob("*.pt"))
    ]
    assert kept == [True, False]
    with inline(Line, checkpoints=checkpoints, resume="auto"):
        assert any("whose loss, score or weights were not finite" in each for each in found(caplog))

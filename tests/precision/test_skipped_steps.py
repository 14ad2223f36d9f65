"""fp16 leaves out a step whose gradients are not finite, says so, and goes on with a smaller scale."""

from typing import Any

import pytest
import torch

from raysgd import TrainingOptions
from tests.torch.small import Line, inline, operator_of, weights


class Bursts(Line):
    """Its gradients are infinite in the batches that the config names."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        if batch_info["global_step"] in self.config["bursts"]:
            loss = loss * float("inf")
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"num_samples": len(x)}


def test_skipped_steps_are_counted_where_there_were_any() -> None:
    with inline(Bursts, options=TrainingOptions(precision="fp16"), config={"bursts": [1, 4, 5]}) as trainer:
        scaler = operator_of(trainer)._amp_scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
        assert trainer.train()["skipped_steps"] == 1
        assert scaler.get_scale() == 32.0
        before = weights(trainer)
        assert trainer.train(num_steps=1).get("skipped_steps") is None
        assert not torch.equal(before, weights(trainer))
        before = weights(trainer)
        assert trainer.train(num_steps=2)["skipped_steps"] == 2
        assert torch.equal(before, weights(trainer))
        assert scaler.get_scale() == 8.0
        assert "skipped_steps" not in trainer.train()
        assert "skipped_steps" not in trainer.validate()


def test_a_window_with_one_bad_batch_is_one_skipped_step() -> None:
    with inline(
        Bursts, options=TrainingOptions(precision="fp16", accumulate=3, clip_norm=1.0), config={"bursts": [1]}
    ) as trainer:
        before = weights(trainer)
        assert trainer.train()["skipped_steps"] == 1
        assert torch.equal(before, weights(trainer))
        trainer.train()
        assert not torch.equal(before, weights(trainer))


def test_the_scaler_travels_with_checkpoints(tmp_path: Any) -> None:
    with inline(Bursts, options=TrainingOptions(precision="fp16"), config={"bursts": [0]}) as trainer:
        trainer.train()
        scale = operator_of(trainer)._amp_scaler.get_scale()
        trainer.save(tmp_path / "saved.pt")
    with inline(Bursts, options=TrainingOptions(precision="fp16"), config={"bursts": []}) as trainer:
        assert operator_of(trainer)._amp_scaler.get_scale() > scale
        trainer.load(tmp_path / "saved.pt")
        assert operator_of(trainer)._amp_scaler.get_scale() == scale
        assert "skipped_steps" not in trainer.train()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_formats_skip_nothing(precision: str) -> None:
    with inline(Bursts, options=TrainingOptions(precision=precision), config={"bursts": [0]}) as trainer:
        assert "skipped_steps" not in trainer.train()

"""Options act in each `self.step()`, also without a batch of the iterator: in a `train_epoch` that makes its own data."""

from typing import Any

import pytest
import torch
from torch import nn

from raysgd import NonFiniteError, TrainingOptions
from tests.torch.small import Line, inline, rows, weights


class OwnData(Line):
    """As in reinforcement learning."""

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        x, y = rows()
        for step in range(4):
            loss = 100 * self.criterion(self.model(x), y) * (float("inf") if step in info.get("infinite", ()) else 1.0)
            self.zero_grad()
            self.backward(loss)
            self.step()
        return {"batches": sum(1 for _ in iterator) if "batches" in info else 0}


def by_hand(clip: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x, y = rows()
    for _ in range(4):
        optimizer.zero_grad()
        (100 * nn.functional.mse_loss(model(x), y)).backward()
        clip(model.parameters())
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("info", [{}, {"batches": True}], ids=["no iterator", "before its first batch"])
@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_gradients_are_clipped(option: str, info: dict[str, Any]) -> None:
    clip = {"clip_norm": nn.utils.clip_grad_norm_, "clip_value": nn.utils.clip_grad_value_}[option]
    with inline(OwnData, options=TrainingOptions(**{option: 0.5})) as trainer:  # type: ignore[arg-type]
        trainer.train(info=info)
        assert torch.equal(weights(trainer), by_hand(lambda parameters: clip(parameters, 0.5)))


def test_steps_with_infinite_gradients_are_left_out_and_counted() -> None:
    with inline(OwnData, options=TrainingOptions(on_nonfinite="skip")) as trainer:
        assert trainer.train(info={"infinite": (0, 2, 3)})["skipped_steps"] == 3
        assert weights(trainer).isfinite().all()
    raises = pytest.raises(NonFiniteError, match="samples of unknown indices")
    with inline(OwnData, options=TrainingOptions(on_nonfinite="raise")) as trainer, raises:
        trainer.train(info={"infinite": (1,)})


def test_too_many_infinite_gradients_in_a_row_are_an_error() -> None:
    raises = pytest.raises(NonFiniteError, match="49 such batches in a row")
    with inline(OwnData, options=TrainingOptions(on_nonfinite="skip")) as trainer, raises:
        for _ in range(13):
            trainer.train(info={"infinite": range(4)})

"""`num_samples` counts the samples that raysgd has chosen, whatever a batch of them looks like."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import TrainingOptions
from tests.torch.small import Line, inline, weights

SIZES = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)  # numbers of boxes, or lengths of sequences


def boxes(number: int) -> tuple[torch.Tensor, float]:
    return torch.full((SIZES[number], 2), 0.1 * number), float(number)


def listed(items: list[Any]) -> tuple[list[torch.Tensor], list[float]]:
    return [box for box, _ in items], [value for _, value in items]


class Detects(Line):
    """Gets batches of lists, as detectors do, whose first tensor is one sample's boxes."""

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data: Any = [boxes(each) for each in range(len(SIZES))]
        loader = DataLoader(data, batch_size=4, collate_fn=listed)
        return {"train_loader": loader, "validation_loader": loader}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = torch.stack([self.model(box).mean() for box in batch[0]]).mean()
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"value": sum(batch[1]) / len(batch[1])}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"value": sum(batch[1]) / len(batch[1])}


def test_batches_of_lists() -> None:
    with inline(Detects) as trainer:
        for result in (trainer.train(), trainer.validate()):
            assert result["num_samples"] == 10
            assert result["value"] == pytest.approx(4.5)


def test_an_accumulation_window_of_batches_of_lists_is_a_mean_over_samples() -> None:
    class Whole(Detects):
        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"train_loader": DataLoader(super().loaders(config)["train_loader"].dataset, 10, collate_fn=listed)}

    with inline(Detects, options=TrainingOptions(accumulate=3)) as trainer, inline(Whole) as whole:
        trainer.train()
        whole.train()
        torch.testing.assert_close(weights(trainer), weights(whole))


def test_sequences_with_time_first() -> None:
    class Recurrent(Line):
        def make_model(self) -> nn.Module:
            return nn.Linear(2, 1)

        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            data: Any = [(torch.zeros(7, 2), torch.zeros(7, 1)) for _ in range(10)]

            def time_first(items: Any) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.stack([x for x, _ in items], 1), torch.stack([y for _, y in items], 1)

            loader = DataLoader(data, batch_size=4, collate_fn=time_first)
            return {"train_loader": loader, "validation_loader": loader}

    with inline(Recurrent) as trainer:
        assert trainer.train()["num_samples"] == trainer.validate()["num_samples"] == 10


def test_items_that_are_batches_count_their_rows() -> None:
    class Batched(Line):
        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            data: Any = [(torch.zeros(6, 2), torch.zeros(6, 1)) for _ in range(2)]
            return {"train_loader": DataLoader(data, batch_size=None)}

    with inline(Batched) as trainer:
        assert trainer.train()["num_samples"] == 12

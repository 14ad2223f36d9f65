"""Code that calls the model without DDP's wrapper lets the ranks train different models, without an error: it is found, and the
message names the place and the cause. tests/local/test_diverging_ranks.py has other mistakes, and errors."""

import logging

import pytest
import torch

from raysgd.torch import TorchTrainer
from tests.local.test_diverging_ranks import STEPS, Mistaken, weights_of


class Unwrapped(Mistaken):
    """Its gradients are not averaged."""

    def predicted(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.module(features)  # type: ignore[no-any-return]


def test_a_mistake_that_raises_no_error_is_logged_once(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    config = {"mistake": "no wrapper"}
    with (
        caplog.at_level(logging.WARNING, "raysgd"),
        TorchTrainer(training_operator_cls=Unwrapped, config=config, num_workers=2, use_gpu=False) as training,
    ):
        training.train()
        training.train()
        first, second = weights_of(training)
        assert first != second
    (text,) = [record.getMessage() for record in caplog.records if "do not train the same model" in record.getMessage()]
    assert text.startswith(f"after step {STEPS} ")
    assert "the parameter weight of self.model differs between rank 0 and rank 1 by about" in text
    assert "self.model.module(x)" in text

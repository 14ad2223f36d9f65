"""A load in the middle of an epoch whose data has no position."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from tests.torch.small import Line, inline, rows


class Streamed(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": list(DataLoader(TensorDataset(*rows()), batch_size=2))}


def test_a_load_in_mid_epoch_of_an_iterable_says_that_the_epoch_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with inline(Streamed, seed=0) as trainer, inline(Streamed, seed=0) as other, inline(Streamed, seed=0) as whole:
        trainer.train(num_steps=2)
        other.load_state_dict(trainer.state_dict())
        assert [each.getMessage() for each in caplog.records] == [
            "the checkpoint is 2 batches into an epoch of a list, which has no position to save. This epoch begins again, so some "
            "samples are used twice. To continue within an epoch, use a loader with state_dict and load_state_dict"
        ]
        assert other.train()["batch_count"] == 6
        whole.load_state_dict(other.state_dict())
    assert len(caplog.records) == 1, "at the end of an epoch, nothing is repeated"

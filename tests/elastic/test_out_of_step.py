"""A collective call that only some ranks make ends with its time limit. A result that may be wrong is an error, which is
not retried."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysgd import ElasticConfig, OutOfStepError, TrainingFailedError
from raysgd.torch import TorchTrainer
from raysgd.train import Trainer
from tests.torch.small import Line

pytestmark = pytest.mark.elastic

LIMIT_S = 10.0
AT = 3  # the batch of the call, counted from 0

# What only rank 1 does. A model with two inputs and one output has three gradients, and torch's DDP sums them in one call.
EXTRA: dict[str, Callable[[], Any]] = {
    "a smaller all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
    "an all_reduce of the same size": lambda: dist.all_reduce(torch.zeros(3)),
    "a barrier": lambda: dist.barrier(),
}


class Extra(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.world_rank == 1 and batch_info["batch_idx"] == AT and "extra" in batch_info:
            batch_info["extra"]()
        return super().train_batch(batch, batch_info)


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    elastic = ElasticConfig(hang_timeout_s=LIMIT_S, grow="epoch")
    config = {"rows": 64, "batch": 4}
    with TorchTrainer(training_operator_cls=Extra, num_workers=2, config=config, elastic=elastic) as trainer:
        yield trainer


@pytest.mark.parametrize("kind", ["a smaller all_reduce", "an all_reduce of the same size"])
def test_a_call_that_is_taken_for_another_is_an_error(
    trainer: TorchTrainer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.resize(2)
    with caplog.at_level(logging.WARNING, logger="raysgd"), pytest.raises(OutOfStepError) as caught:
        trainer.train(info={"extra": EXTRA[kind]}, max_retries=-1)
    text = str(caught.value)
    assert "out of step in epoch" in text and ", batch " in text and "Let every rank make the same calls" in text
    noted = trainer.recoveries[-1]  # where ranks wait for each other, the batch may be trained again first
    assert (noted.reason, noted.world_size_before) == ("out of step", 2) and noted.detail in text
    assert any("out of step: the call ends" in message for message in caplog.messages)
    trainer.train()
    assert trainer.train()["num_samples"] == 64, "the trainer stays usable"


def test_ranks_that_wait_in_different_calls_are_shown(trainer: TorchTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was summed that is wrong, so the batch is trained again until that has failed too often."""
    trainer.resize(2)
    with caplog.at_level(logging.WARNING, logger="raysgd"), pytest.raises(TrainingFailedError, match=r"2 failures"):
        trainer.train(info={"extra": EXTRA["a barrier"]}, max_retries=1)
    shown = [message for message in caplog.messages if message.startswith("no progress for")]
    assert any("rank 1" in each and "barrier" in each and Path(__file__).name in each for each in shown)
    assert any("rank 0" in each and "backward" in each for each in shown)


def uneven(config: dict[str, Any]) -> int:
    from raysgd import train

    for _ in range(3):
        dist.all_reduce(torch.zeros(1))
    if train.world_rank() == 0 and config["uneven"]:
        dist.all_reduce(torch.zeros(1))
    return train.world_rank()


def test_a_function_that_one_rank_has_returned_from(ray_cluster: None, tmp_path: Path) -> None:
    elastic = ElasticConfig(hang_timeout_s=LIMIT_S, grow=False)
    with Trainer("torch", num_workers=2, max_retries=-1, logdir=tmp_path, elastic=elastic) as trainer:
        with pytest.raises(Exception, match="out of step") as caught:
            trainer.run(uneven, {"uneven": True})
        text = str(caught.value)
        assert "rank 1 has finished, and rank 0 is in a collective call after its last one" in text
        assert [each.reason for each in trainer.recoveries] == ["out of step"]
        assert trainer.run(uneven, {"uneven": False}) == [0, 1]

"""A collective call that only some ranks make is reported with ranks, lines and batch, and is not retried."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, OutOfStepError
from raysgd.torch import TorchTrainer
from raysgd.train import Trainer
from tests.tiers import NIGHTLY
from tests.torch.small import Line, rows

pytestmark = pytest.mark.elastic

LIMIT_S = 10.0
AT = 3  # the batch of the call, counted from 0


def own_all_reduce(size: int) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.zeros(size))


# What only rank 1 does. A model with two inputs and one output has three gradients, and torch's DDP sums them in one call.
EXTRA: dict[str, Callable[[], Any]] = {
    "a smaller all_reduce": own_all_reduce(1),
    "a larger all_reduce": own_all_reduce(100_000),
    "an all_reduce of the same size": own_all_reduce(3),
    "a barrier": lambda: dist.barrier(),
    "a broadcast": lambda: dist.broadcast(torch.zeros(1), 0),
    "an all_gather_object": lambda: dist.all_gather_object([None, None], 1),
}
# Except in `make nightly`, these are enough: one for each way in which the error shows.
USUAL = ("a smaller all_reduce", "an all_reduce of the same size", "a barrier")
KINDS = list(EXTRA) if NIGHTLY else list(USUAL)


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


@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_call_on_one_rank(trainer: TorchTrainer, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer.resize(2)
    before = len(trainer.recoveries)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="raysgd"), pytest.raises(OutOfStepError) as caught:
        trainer.train(info={"extra": EXTRA[kind]}, max_retries=-1)
    assert time.monotonic() - began < 120, "it was retried"
    text = str(caught.value)
    assert "out of step in epoch" in text and ", batch " in text and "Let every rank make the same calls" in text
    assert "rank 0" in text and "rank 1" in text and "all_reduce" in text
    if "all_reduce" not in kind:
        name = kind.split()[-1]
        assert f"rank 1 is in {name}, its collective call number" in text and Path(__file__).name in text
        assert "rank 0 is in backward" in text
    (noted,) = trainer.recoveries[before:]
    assert (noted.reason, noted.world_size_before) == ("out of step", 2)
    assert noted.detail in text
    assert any("out of step: the call ends" in message for message in caplog.messages)
    trainer.train()
    assert trainer.train()["num_samples"] == 64, "the trainer stays usable"


class Pictures(Line):
    """Rank 0 alone draws a picture with the model that is trained, in whose forward DDP exchanges the buffers of BatchNorm, if the
    user has passed that."""

    def setup(self, config: dict[str, Any]) -> None:
        models = [nn.Sequential(nn.Linear(2, size), nn.BatchNorm1d(size), nn.Linear(size, 1)) for size in (4, 64)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        (self.model, self.other), (self.optimizer, _), self.criterion = self.register(
            models=models,
            optimizers=optimizers,
            criterion=nn.MSELoss(),
            ddp_args={"broadcast_buffers": True},
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*rows(64)), batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.other(batch[0]).mean().backward()
        result = super().train_batch(batch, batch_info)
        if self.world_rank == 0 and batch_info["batch_idx"] == AT and "picture" in batch_info:
            with torch.set_grad_enabled(batch_info["picture"] == "with gradients"):
                self.model(batch[0])  # the picture
        return result


@pytest.mark.parametrize("how", ["with gradients", pytest.param("without", marks=pytest.mark.more)])
def test_a_model_that_only_rank_0_calls(ray_cluster: None, how: str) -> None:
    """This is noticed within seconds, too, and the line is named."""
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the picture"))
    elastic = ElasticConfig(hang_timeout_s=600, grow=False)
    with TorchTrainer(training_operator_cls=Pictures, num_workers=2, elastic=elastic) as trainer:
        began = time.monotonic()
        with pytest.raises(OutOfStepError) as caught:
            trainer.train(info={"picture": how})
        assert time.monotonic() - began < 120
        text = str(caught.value)
        assert f"in step {AT + 1}" in text and f"called a model at {__file__}:{line} train_batch" in text
        trainer.train()
        assert trainer.train()["num_samples"] == 64, "the trainer stays usable"


def uneven(config: dict[str, Any]) -> int:
    from raysgd import train

    for _ in range(3):
        dist.all_reduce(torch.zeros(1))
    if train.world_rank() == 0 and config["uneven"]:
        dist.all_reduce(torch.zeros(1))
    return train.world_rank()


def test_a_function_that_one_rank_has_returned_from(ray_cluster: None, tmp_path: Path) -> None:
    """This is noticed at once: the collective call itself would end after nine minutes."""
    elastic = ElasticConfig(hang_timeout_s=600, grow=False)
    with Trainer("torch", num_workers=2, max_retries=-1, logdir=tmp_path, elastic=elastic) as trainer:
        with pytest.raises(Exception, match="out of step") as caught:
            trainer.run(uneven, {"uneven": True})
        text = str(caught.value)
        assert "rank 0 is in all_reduce" in text and "in uneven" not in text and Path(__file__).name in text
        assert "rank 1 has finished" in text
        assert [each.reason for each in trainer.recoveries] == ["out of step"]
        assert trainer.run(uneven, {"uneven": False}) == [0, 1]

"""The witness that `raysgd drill` adds: what it says when ranks fail, and that the user's code does not see it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from raysgd.torch.step.parts.witness import watched
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of

ROWS, BATCH, WORKERS = 23, 2, 3


class Curve(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        optimizers = [torch.optim.Adam([each], lr=0.1) for each in model.parameters()]
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model,
            optimizers=self.chosen(optimizers),
            criterion=nn.MSELoss(),
            schedulers=self.schedules(optimizers),
        )
        x = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(7))
        self.register_data(
            train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
        )

    def chosen(self, optimizers: list[Any]) -> Any:
        return optimizers[0]

    def schedules(self, optimizers: list[Any]) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizers[0], [lambda step: 0.9**step])


class Two(Curve):
    def chosen(self, optimizers: list[Any]) -> Any:
        return optimizers

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        with self.autocast():
            loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        for each in self.optimizer:
            self.step(each)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


class ByHand(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        assert self.unwrapped() is self.unwrapped(self.model), "the user's is the only model"
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {}


class Doubling(Curve):
    """Makes two backward passes with each batch when a worker is missing."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        for _ in range(1 if self.world_size == WORKERS else 2):
            self.backward(self.criterion(self.model(batch[0]), batch[1]))
        self.step()
        return {}


KILLS = (Fault("kill", "forward", rank=0, step=1), Fault("kill", "applied", rank=1, step=2))


def run(
    operator: type[TrainingOperator], faults: Any = (), batch: Any = "auto", **given: Any
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Train two epochs. Return the weights, what the samples have weighed, and how many steps were skipped."""
    with (
        Cluster(faults) as cluster,
        TorchTrainer(
            training_operator_cls=operator,
            num_workers=WORKERS,
            use_gpu=False,
            seed=4,
            scheduler_step_freq="epoch",
            elastic=ElasticConfig(batch=batch, grow=False, on_divergence="raise"),
            options=TrainingOptions(parallel="ddp", **given),
        ) as trainer,
    ):
        results = [trainer.train(max_retries=-1) for _ in range(2)]
        assert not cluster.left
        models = trainer.state_dict()["models"]
        skipped = sum(each.get("skipped_steps", 0) for each in results)
        return weights_of(trainer), models[-1].get("entered", torch.zeros(0))[:ROWS], skipped


CASES: list[tuple[type[TrainingOperator], dict[str, Any]]] = [
    *((Curve, given) for given in ({}, {"accumulate": 2}, {"clip_norm": 0.01}, {"precision": "fp16"})),
    *((Two, given) for given in ({}, {"accumulate": 2}, {"clip_norm": 0.01})),
]


@pytest.mark.parametrize(("operator", "given"), CASES, ids=lambda each: "".join(each) if type(each) is dict else None)
def test_each_sample_enters_once_and_the_weights_are_those_without_it(operator: Any, given: dict[str, Any]) -> None:
    weights, _, _ = run(operator, **given)
    seen, calm, skipped = run(watched(operator), **given)
    steps = 2 * -(-ROWS // (BATCH * WORKERS * given.get("accumulate", 1)))
    assert torch.equal(weights, seen) and float(calm.sum()) == pytest.approx(steps - skipped, 1e-5)
    struck = run(watched(operator), KILLS, **given)[1]
    torch.testing.assert_close(struck, calm, rtol=1e-5, atol=0)


def test_a_part_that_enters_twice() -> None:
    calm, struck = (run(watched(Doubling), faults)[1] for faults in ((), KILLS))
    assert int((struck > calm * 1.4).sum()) > ROWS // 2


def test_without_the_helpers_nothing_is_measured() -> None:
    weights, entered, _ = run(watched(ByHand), KILLS, batch="per_worker")
    assert not entered.any() and weights.isfinite().all()

"""On several workers, all ranks have the buffers of rank 0 after each step, although each has updated the statistics of BatchNorm
layers with batches of its own. An evaluation is that of one model: rank 0's, which is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.peek import models_of


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose variance grows, so that ranks have other statistics. The ranks evaluate different numbers of them."""
    x = torch.randn(55, 4, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.2, 3, 55)[:, None]
    return x, x.sum(1, keepdim=True).sin()


def models() -> list[nn.Module]:
    """One that is not trained, so that DDP does not wrap it, and one that is."""
    torch.manual_seed(0)
    fixed = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).requires_grad_(False)
    head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    fixed.register_buffer("batches", torch.zeros((), dtype=torch.int16), persistent=False)
    return [fixed, head]


class Normalized(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        made = models()
        optimizer = torch.optim.SGD(made[1].parameters(), lr=0.05)
        (self.fixed, self.head), self.optimizer, self.criterion = self.register(
            models=made, optimizers=optimizer, criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(*data()), batch_size=5)
        self.register_data(train_loader=loader, validation_loader=loader, test_loader=loader)

    def model(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed.training:
            self.fixed.batches += self.world_rank
        return self.head(self.fixed(x))  # type: ignore[no-any-return]


def buffers(operator: Any) -> list[torch.Tensor]:
    return [buffer.clone() for model in models_of(operator) for buffer in model.buffers()]


def differ(trainer: TorchTrainer) -> int:
    """Return in how many buffers some rank differs from rank 0."""
    first, *others = trainer.apply_all_operators(buffers)
    return sum(any(not torch.equal(mine, each[place]) for each in others) for place, mine in enumerate(first))


def disturb(operator: Any) -> None:
    for model in models_of(operator):
        for buffer in model.buffers():
            buffer += operator.world_rank


def outputs(of: list[nn.Module]) -> torch.Tensor:
    with torch.no_grad():
        return of[1].eval()(of[0].eval()(data()[0]))  # type: ignore[no-any-return]


def loss(found: torch.Tensor) -> float:
    return nn.functional.mse_loss(found, data()[1]).item()


def saved(path: Path) -> list[nn.Module]:
    """Return the evaluated models of a file."""
    state, made = torch.load(path, weights_only=True), models()
    for number, model in enumerate(made):
        model.load_state_dict(state["models"][number])
    return made


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(2, {}, id="two"),
        pytest.param(3, {}, id="three", marks=pytest.mark.more),
        pytest.param(2, {"options": TrainingOptions(parallel="fsdp")}, id="sharded", marks=pytest.mark.more),
        pytest.param(2, {"backend": "horovod"}, id="Horovod", marks=[pytest.mark.horovod, pytest.mark.more]),
    ],
)
def test_an_evaluation_is_that_of_the_model_that_is_saved(
    ray_cluster: None, tmp_path: Path, workers: int, settings: dict[str, Any]
) -> None:
    automatic = AutoCheckpoint(path=tmp_path, best="val_loss", keep=None)
    arguments: dict[str, Any] = {"num_workers": workers, "use_gpu": False, "checkpoints": automatic, **settings}
    with TorchTrainer(training_operator_cls=Normalized, **arguments) as trainer:
        for _ in trainer.epochs(2):
            trainer.train()
            assert differ(trainer) == 0
            assert trainer.validate()["val_loss"] == pytest.approx(loss(outputs(trainer.get_model())), abs=1e-6)
            assert differ(trainer) == 0
        trainer.apply_all_operators(disturb)
        expected = outputs(trainer.get_model())
        torch.testing.assert_close(trainer.predict(TensorDataset(data()[0])), expected, atol=1e-6, rtol=0)
        assert differ(trainer) == 0
        trainer.apply_all_operators(disturb)
        assert trainer.test()["test_loss"] == pytest.approx(loss(outputs(trainer.get_model())), abs=1e-6)
        assert differ(trainer) == 0
    files = sorted(tmp_path.glob("*.pt"))
    scores = [json.loads(path.with_suffix(".json").read_text())["score"] for path in files]
    assert scores == pytest.approx([loss(outputs(saved(path))) for path in files], abs=1e-6)
    assert len(set(scores)) == 2

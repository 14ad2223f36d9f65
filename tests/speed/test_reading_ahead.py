"""While the ranks exchange gradients, each reads its next batch: in the same order, with the same random numbers."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:the training loader does not shuffle"),
]
SAMPLES, BATCH = 24, 3  # four batches for each of two workers


class Noisy(Dataset[Any]):
    """Reading a sample draws random numbers, and is noted."""

    def __init__(self, events: list[Any], broken: int | None) -> None:
        self.events, self.broken = events, broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.broken:
            raise LookupError(f"sample {index} is damaged")
        if self.events[-1:] != ["read"]:
            self.events.append("read")
        assert torch.is_grad_enabled()
        x = torch.tensor([float(index), 1.0]) + torch.rand(2)
        return x, x.sum().view(1)


class Watched(nn.Module):
    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.layer, self.dropout, self.events = nn.Linear(2, 1), nn.Dropout(0.5), events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        return self.layer(self.dropout(x))


class Operator(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        self.events: list[Any] = []
        model = Watched(self.events)
        two = config.get("optimizers") == 2
        trained = [[model.layer.weight], [model.layer.bias]] if two else [[*model.parameters()]]
        self.model, (self.optimizer, *_), self.criterion = self.register(
            models=model, optimizers=[torch.optim.SGD(part, lr=0.001) for part in trained], criterion=nn.MSELoss()
        )
        self.optimizer.register_step_post_hook(lambda *_: self.events.append("step"))
        data = Noisy(self.events, config.get("broken"))
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH, num_workers=config.get("processes", 0)))
        torch.manual_seed(self.world_rank)

    def taken(self) -> list[str]:
        taken = list(self.events)
        self.events.clear()
        return taken


def trainer(options: TrainingOptions | None = None, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Operator, num_workers=2, use_gpu=False, seed=5, options=options, config=config
    )


def events(of: TorchTrainer) -> list[str]:
    first, second = of.apply_all_operators(Operator.taken)
    assert first == second
    return first  # type: ignore[no-any-return]


AHEAD = ["read", *["forward", "read", "step"] * 3, "forward", "step"]
IN_TURN = ["read", "forward", "step"] * 4


def test_the_next_batch_is_read_before_the_step() -> None:
    with trainer() as ahead, trainer() as plain:
        ahead.train()
        plain.train(profile=True)  # "grad" is to be the time of the backward pass alone
        assert events(ahead) == AHEAD
        assert events(plain) == IN_TURN
        for mine, other in zip(ahead.get_model().parameters(), plain.get_model().parameters(), strict=True):
            assert torch.equal(mine, other)


def test_a_call_reads_no_batch_of_the_next_call() -> None:
    with trainer() as limited, trainer() as whole:
        limited.train(num_steps=2)
        assert events(limited) == ["read", "forward", "read", "step", "forward", "step"]
        assert limited.train(num_steps=3)["num_samples"] == 3 * 2 * BATCH  # two of this epoch, one of the next
        assert events(limited)[:5] == ["read", "forward", "read", "step", "forward"]
        whole.train()
        whole.train(num_steps=1)
        for mine, other in zip(limited.get_model().parameters(), whole.get_model().parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"optimizers": 2}, None),
        ({"processes": 1}, None),
        ({}, TrainingOptions(parallel=None)),
    ],
    ids=["two optimizers", "loader processes", "no exchange by DDP"],
)
def test_other_operators_read_between_two_batches(config: dict[str, Any], options: TrainingOptions | None) -> None:
    with trainer(options, **config) as other:
        other.train()
        seen = events(other)
    assert seen == (IN_TURN if "processes" not in config else ["forward", "step"] * 4)


def test_an_error_is_raised_when_the_batch_is_needed() -> None:
    """The steps before it are done on all ranks."""
    with trainer(broken=2 * 2 * BATCH + 1) as broken:
        with pytest.raises(LookupError, match="sample 13 is damaged"):
            broken.train()
        assert broken.apply_all_operators(lambda operator: operator.events.count("step")) == [2, 2]

"""Operators for the tests on a cluster. They are pickled by value, because this module is not installed on the workers."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_SIZE


class Net(nn.Module):
    """A model class whose identity a test can compare."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class OwnError(Exception):
    """Cannot be created from its `args`, like many exceptions of libraries."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} failed with {code}")
        self.code = code


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Classes(TrainingOperator):
    """Learns two classes, and fails where `info` says."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss()
        )
        batch = config.get(BATCH_SIZE, 8)
        self.register_data(
            train_loader=DataLoader(
                data(config.get("rows", 64)), batch_size=batch, shuffle=config.get("shuffle", False)
            ),
            validation_loader=DataLoader(data(101), batch_size=batch),
        )
        self.note = {"rank": self.world_rank}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("fail_rank") == self.world_rank and batch_info["batch_idx"] == 1:
            raise OwnError("rank", code=self.world_rank)
        return super().train_batch(batch, batch_info)


class Large(Classes):
    """Its own state is larger than one message."""

    def state_dict(self) -> Any:
        return {"by": self.note, "table": torch.ones(2_000_000)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.note, self.table = {"loaded": state_dict["by"]}, state_dict["table"]

"""A small operator and its data, for tests in which it does not matter what is learned."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator


def rows(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (the row's number, and 1) and targets: y = x / 10 + 1."""
    x = torch.stack([torch.arange(count, dtype=torch.float32) / 10, torch.ones(count)], dim=1)
    return x, x.sum(dim=1, keepdim=True)


class Numbers(Dataset[int]):
    """Item i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Line(TrainingOperator):
    """A linear model. By default everything is as small as possible."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config.get("seed", 0))
        model = self.make_model()
        optimizer = self.make_optimizer(model, config.get("lr", 0.1))
        self.register_data(**self.loaders(config))  # before the schedule, which may depend on its length
        parts: dict[str, Any] = {"models": model, "optimizers": optimizer, "criterion": nn.MSELoss()}
        if "scheduler" in config:
            parts["schedulers"] = config["scheduler"](optimizer)
        self.model, self.optimizer, self.criterion, *rest = self.register(**parts)
        self.scheduler = rest[0] if rest else None

    def make_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data, batch = TensorDataset(*rows(config.get("rows", 12))), config.get("batch", 4)
        return {
            "train_loader": DataLoader(data, batch_size=batch, shuffle=config.get("shuffle", False)),
            "validation_loader": DataLoader(data, batch_size=batch),
        }


class Recording(Line):
    """Keeps the first column of every batch in `seen`, and the `batch_info` that came with it."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[list[float]] = []
        self.infos: list[dict[str, Any]] = []

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        made = config["loader"]() if "loader" in config else DataLoader(Numbers(config.get("rows", 12)), batch_size=4)
        return {"train_loader": made, "validation_loader": config.get("validation", lambda: made)()}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(batch.tolist())
        self.infos.append(batch_info)
        self.optimizer.step()
        return {"num_samples": len(batch)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.infos.append(batch_info)
        return {"num_samples": len(batch), "val_sum": float(batch.sum())}


def inline(operator: type[TrainingOperator] = Line, **arguments: Any) -> TorchTrainer:
    """Return a trainer without Ray, in this process."""
    config = arguments.pop("config", {})
    return TorchTrainer(training_operator_cls=operator, config=config, **{"use_gpu": False, **arguments})


def operator_of(trainer: TorchTrainer) -> Any:
    return trainer.get_local_operator()


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.get_model().parameters()])


def set_scale(trainer: TorchTrainer, scale: float) -> Any:
    """Set the scale of the losses in fp16, at which a few small steps are not left out. Return the scaler: None in other formats."""
    scaler = operator_of(trainer)._amp_scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    return scaler


def flat(lists: list[list[Any]]) -> Iterator[Any]:
    return (item for each in lists for item in each)

"""An operator whose loss is a mean over tokens, and the same steps by hand, in one process over the batches of all workers."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator
from raysgd.torch.step.parts.witness import Witness

__all__ = ["Counting", "Default", "Weighted", "by_hand", "entered", "lengths_of"]

LONGEST, WORDS, IGNORED = 6, 5, -100


def lengths_of(rows: int) -> torch.Tensor:
    """Return the tokens of each row: 0 to 6. Rows 4 to 7 have none."""
    lengths = torch.randint(0, LONGEST + 1, (rows,), generator=torch.Generator().manual_seed(5))
    lengths[4:8] = 0
    return lengths


def data_of(rows: int, full: int = 0) -> TensorDataset:
    """Return ragged rows, after this many full ones."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(rows, LONGEST, 3, generator=source).double()
    y = torch.randint(0, WORDS, (rows, LONGEST), generator=source)
    y[full:][torch.arange(LONGEST) >= lengths_of(rows)[full:, None]] = IGNORED
    return TensorDataset(x, y)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, WORDS)).double()


class Counting(TrainingOperator):
    """Counts tokens. Its loss is NaN in a batch without any."""

    def setup(self, config: dict[str, Any]) -> None:
        model, witness = model_of(), Witness(config["rows"])
        groups = [{"params": list(model.parameters())}, witness_group(witness)]
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        (self.model, self.witness), self.optimizer = self.register(models=[model, witness], optimizers=optimizer)
        self.register_data(train_loader=DataLoader(data_of(config["rows"]), batch_size=config["batch"]))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        kept = y != IGNORED
        self.zero_grad()
        with self.autocast():
            scores = self.model(x)
        summed = cross_entropy(scores.double().flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = summed / kept.sum()  # 0/0 without tokens, and so are its gradients
        loss = loss + self.witness(batch_info["rows"], kept.sum(1).double() / kept.sum())
        self.backward(loss, count=self.counted(kept))
        self.step()
        return {"train_loss": (loss.detach(), kept.sum()), "num_samples": len(x)}

    def counted(self, kept: torch.Tensor) -> Any:
        return kept.sum()


def witness_group(witness: nn.Module) -> dict[str, Any]:
    """Return the group of an optimizer of plain SGD, in which the witness adds up weights: on the path of the user's own parameters."""
    return {"params": list(witness.parameters()), "lr": -1.0, "momentum": 0.0}


def entered(operator: Any) -> torch.Tensor:
    """Return the sum of the weights with which each sample has entered."""
    found: torch.Tensor = operator.unwrapped(operator.witness).entered.detach().clone()
    return found


class Default(TrainingOperator):
    """Has the default methods."""

    weight: torch.Tensor | None = None
    full = 0

    def setup(self, config: dict[str, Any]) -> None:
        model, weight = Scores(), self.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(weight=weight)
        )
        loader = DataLoader(data_of(config["rows"], self.full), batch_size=config["batch"])
        self.register_data(train_loader=loader, validation_loader=loader)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).transpose(1, 2)


class Weighted(Default):
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25]).double()


def by_hand(
    rows: int, batch: int, *, clip: float | None = None, weight: torch.Tensor | None = None, full: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train an epoch with one mean over the tokens of each batch. Return the weights, and what each row has weighed."""
    model, witness, data = model_of(), Witness(rows), data_of(rows, full)
    groups = [{"params": list(model.parameters())}, witness_group(witness)]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    for start in range(0, rows, batch):
        x, y = data[start : start + batch]
        kept = y != IGNORED
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), weight, reduction="sum")
        loss = loss / (kept.sum() if weight is None else (weight[y.clamp(min=0)] * kept).sum())
        (loss + witness(list(range(start, start + len(x))), kept.sum(1).double() / kept.sum())).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), witness.entered.detach()

"""Without a criterion, the default batch methods call the model with the batch, and use the loss that it returns."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd.errors import MissingPartError
from raysgd.torch import TrainingOperator
from tests.torch.small import Line, inline, weights

ROWS = 23


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7)).double()
    return x, (x.sum(dim=1) > 0).long()


class Named(Dataset[dict[str, torch.Tensor]]):
    """Rows as a tokenizer makes them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, labels = labelled()
        return {"inputs": x[index], "labels": labels[index]}


class Classifier(nn.Module):
    """Returns what `answer` makes of the loss and the logits; the loss is None if it gets no labels."""

    def __init__(self, answer: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(3, 2).double(), answer

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(inputs)
        return self.answer(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


class Own(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = Classifier(config["answer"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        data = Named() if config.get("named") else TensorDataset(*labelled())
        self.register_data(train_loader=DataLoader(data, 4, shuffle=False), validation_loader=DataLoader(data, 5))


ANSWERS: dict[str, Any] = {
    "an object": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    "a dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "logits first": lambda loss, logits: (logits, loss),
    "loss first": lambda loss, logits: (loss, logits),
}


def by_hand(epochs: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights, and the results of a validation."""
    torch.manual_seed(3)
    layer, (x, labels) = nn.Linear(3, 2).double(), labelled()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9)
    for _ in range(epochs):
        for inputs, wanted in zip(x.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(inputs), wanted).backward()
            optimizer.step()
    logits = layer(x).detach()
    right = (logits.argmax(dim=1) == labels).double().mean()
    loss = nn.functional.cross_entropy(logits, labels)
    return nn.utils.parameters_to_vector(layer.parameters()).detach(), {
        "val_loss": loss.item(),
        "val_accuracy": right.item(),
        "num_samples": ROWS,
    }


@pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
@pytest.mark.parametrize("named", [False, True], ids=["tuples", "dicts"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_model_with_its_own_loss_trains_as_a_plain_loop(answer: str, named: bool) -> None:
    expected, validated = by_hand(epochs=2)
    with inline(Own, config={"answer": ANSWERS[answer], "named": named}) as trainer:
        assert trainer.train()["num_samples"] == ROWS
        trainer.train()
        assert torch.equal(weights(trainer), expected)
        found = trainer.validate()
        assert {name: found[name] for name in validated} == pytest.approx(validated, rel=1e-6)
        x, _ = labelled()
        data = Named() if named else TensorDataset(*labelled())
        outputs = trainer.predict(data, batch_size=5)
        assert torch.allclose(outputs, trainer.get_model().layer(x).detach())


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(inputs)
        return logits, logits.mean()


@pytest.mark.parametrize("labels", [torch.ones(6, 4).long(), torch.ones(6)], ids=["of tokens", "no classes"])
def test_the_accuracy_is_left_out_where_its_meaning_is_not_known(labels: torch.Tensor) -> None:
    class Other(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            model = Mean()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
            self.register_data(validation_loader=DataLoader(TensorDataset(torch.ones(*labels.shape, 3), labels), 3))

    with inline(Other) as trainer:
        assert set(trainer.validate()) == {"batch_count", "num_samples", "val_loss", "last_val_loss"}


@pytest.mark.parametrize("answer", [lambda loss, logits: logits, lambda loss, logits: (loss, loss.detach(), logits)])
def test_a_model_without_a_loss_is_refused_with_what_is_legal(answer: Any) -> None:
    with inline(Own, config={"answer": answer}) as trainer:
        for call in (trainer.train, trainer.validate):
            with pytest.raises(
                MissingPartError, match=r"need self\.criterion, or a model that .* its own loss: .*`loss`"
            ):
                call()


def test_a_model_that_does_not_take_the_target_lacks_a_criterion() -> None:
    class Forgotten(Line):
        def setup(self, config: dict[str, Any]) -> None:
            model = self.make_model()
            self.model, self.optimizer = self.register(models=model, optimizers=self.make_optimizer(model, 0.1))
            self.register_data(**self.loaders(config))

    class Wrong(Forgotten):
        def make_model(self) -> nn.Module:
            return Misled()

    with inline(Forgotten) as trainer, pytest.raises(MissingPartError, match=r"need self\.criterion, or a model that"):
        trainer.train()
    with inline(Wrong) as trainer, pytest.raises(TypeError, match="unsupported operand"):
        trainer.train()


class Misled(nn.Linear):
    """Has an error of its own."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + "1"


def test_a_batch_method_of_the_users_keeps_what_the_model_returns() -> None:
    class Custom(Own):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {}

    answer = lambda loss, logits: {"logits": logits, "twice": 2 * logits}  # noqa: E731
    with inline(Custom, config={"answer": answer}) as trainer:
        outputs = trainer.predict(labelled()[0], batch_size=4)
        assert set(outputs) == {"logits", "twice"} and outputs["twice"].shape == (ROWS, 2)

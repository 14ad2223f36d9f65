"""Kinds of batches, how they reach the device, and when schedulers step."""

import warnings
from collections import UserDict, namedtuple
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from raysgd import TrainingOptions
from raysgd.torch.registered import move
from tests.torch.small import Line, inline, operator_of


def test_several_features_reach_the_model() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, left: Any, right: Any) -> Any:
            return self.line(torch.cat([left, right], dim=1))

    class Two(Line):
        def make_model(self) -> nn.Module:
            return Pair()

        def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
            batch = torch.ones(4, 1), torch.ones(4, 1), torch.zeros(4, 1)
            return {"train_loader": [batch], "validation_loader": [batch]}

    with inline(Two) as trainer:
        assert trainer.train()["num_samples"] == trainer.validate()["num_samples"] == 4


@pytest.mark.parametrize(
    ("output", "target", "accuracy"),
    [
        (torch.eye(3), torch.tensor([0, 1, 0]), 2 / 3),
        (torch.eye(3).reshape(1, 3, 3), torch.tensor([[0, 1, 1]]), 2 / 3),
        (torch.ones(3), torch.ones(3), 0.0),
    ],
)
def test_accuracy_is_computed_for_class_targets(output: Any, target: Any, accuracy: float) -> None:
    operator = Line({})
    operator.model, operator.criterion = (lambda x: output), (lambda a, b: torch.zeros(()))
    assert float(operator.validate_batch((output, target), {})["val_accuracy"]) == pytest.approx(accuracy)


LOGITS = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [2.0, 1.0], [0.5, 0.7]])


@pytest.mark.parametrize(
    ("output", "target", "criterion", "accuracy"),
    [
        (LOGITS[:, 0], torch.tensor([1.0, 0.0, 0.0, 1.0]), nn.BCEWithLogitsLoss(), 3 / 4),
        (
            LOGITS[:, :1],
            torch.tensor([[1.0], [0.0], [0.0], [1.0]]),
            nn.functional.binary_cross_entropy_with_logits,
            3 / 4,
        ),
        (LOGITS[:, 0].sigmoid(), torch.tensor([1.0, 0.0, 0.0, 0.0]), nn.BCELoss(), 2 / 4),
        (LOGITS, LOGITS.flip(0).softmax(1), nn.CrossEntropyLoss(), 0.0),
        (LOGITS, torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.0, 1.0]]), nn.functional.cross_entropy, 3 / 4),
        (LOGITS, LOGITS, nn.MSELoss(), 0.0),
    ],
)
def test_the_accuracy_of_two_classes_and_of_probabilities(
    output: Any, target: Any, criterion: Any, accuracy: float
) -> None:
    operator = Line({})
    operator.model, operator.criterion = (lambda x: output), criterion
    assert float(operator.validate_batch((output, target), {})["val_accuracy"]) == pytest.approx(accuracy)


def test_targets_that_the_criterion_ignores_do_not_count_in_the_accuracy() -> None:
    target = torch.tensor([0, -100, 1, 1, 0, 1, -100, -100])

    class Ignoring(Line):
        def setup(self, config: dict[str, Any]) -> None:
            self.model, _, self.criterion = self.register(
                models=nn.Identity(), optimizers=[], criterion=nn.CrossEntropyLoss()
            )
            batches = list(zip(LOGITS.repeat(2, 1).split(4), target.split(4), strict=True))
            self.register_data(validation_loader=batches)

    with inline(Ignoring) as trainer:
        assert trainer.validate()["val_accuracy"] == pytest.approx(4 / 5)


def decaying(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(
    ("freq", "steps", "halvings"),
    [
        ("batch", [2, None], 3),
        ("epoch", [None, None], 2),
        ("epoch", [2], 0),
        ("epoch", [4], 1),
        ("epoch", [3, None], 2),
        ("manual", [None, None], 0),
    ],
)
def test_schedulers_step(freq: str, steps: list[int | None], halvings: int) -> None:
    with inline(config={"scheduler": decaying, "lr": 1e-3}, scheduler_step_freq=freq) as trainer:
        for num_steps in steps:
            trainer.train(num_steps=num_steps)
        assert operator_of(trainer).optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**halvings)


def test_update_scheduler() -> None:
    def plateau(optimizer: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    with inline(config={"scheduler": plateau, "lr": 1.0}, scheduler_step_freq="manual") as trainer:
        for loss in (1.0, 2.0):
            trainer.update_scheduler(loss)
        assert operator_of(trainer).optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with inline() as trainer, pytest.raises(TypeError, match=r"self\.register\(schedulers=\.\.\.\)"):
        trainer.update_scheduler(1.0)


def test_models_are_in_the_right_mode() -> None:
    class Modes(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {"training": self.model.training, "grad": torch.is_grad_enabled()}

        validate_batch = train_batch

    with inline(Modes) as trainer:
        for _ in range(2):
            assert (trainer.train()["training"], trainer.validate()["training"]) == (1, 0)
        assert trainer.validate()["grad"] == 0


class Movable:
    def __init__(self) -> None:
        self.where: Any = None

    def to(self, device: Any) -> "Movable":
        self.where = device
        return self


def test_batches_of_any_kind_are_moved() -> None:
    device, tensor = torch.device("meta"), torch.ones(2)
    Point = namedtuple("Point", "x y")
    moved = move(
        {"a": tensor, "b": [tensor, 3], "c": (tensor, "text"), "d": Point(tensor, None), "e": Movable()}, device
    )
    assert all(each.device == device for each in (moved["a"], moved["b"][0], moved["c"][0], moved["d"].x))
    assert moved["b"][1:] == [3]
    assert moved["c"][1] == "text"
    assert isinstance(moved["d"], Point)
    assert moved["e"].where == device


def test_a_dict_with_a_to_method_is_moved_by_it() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        def to(self, device: Any) -> str:
            return f"to {device}"

    class Strict(dict):  # type: ignore[type-arg]
        """A dict that cannot be made from its content, but can be moved."""

        def __init__(self, *, rows: int) -> None:
            super().__init__(rows=rows)

        def to(self, device: Any) -> str:
            return f"to {device}"

    device = torch.device("meta")
    assert move(Encoding(), device) == move(Strict(rows=1), device) == "to meta"


def test_step_returns_whether_it_was_made() -> None:
    class Own(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            features, target = batch
            self.zero_grad()
            with self.autocast():
                loss = self.criterion(self.model(features), target)
            # Small, because fp16 would leave out steps at the first scale otherwise.
            self.backward(loss * (float("nan") if batch_info["batch_idx"] in self.config["bad"] else 1e-4))
            self.made.append(self.step())
            return {"num_samples": len(target)}

    def made(bad: tuple[int, ...] = (), **options: Any) -> list[bool]:
        with inline(Own, config={"bad": bad}, options=TrainingOptions(**options)) as trainer:
            operator_of(trainer).made = found = []
            trainer.train()
            return found

    assert made() == [True] * 3 and made(accumulate=2) == [False, True, True]
    assert made((1,), on_nonfinite="skip") == [True, False, True]
    assert made((1,), precision="fp16") == [True, False, True]


def test_torch_does_not_warn_about_the_order_of_steps() -> None:
    """It would if a scheduler steps before its optimizer has: in a window, or after a step that was left out."""

    class Bad(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            features, target = batch
            return super().train_batch(
                (features * float("nan"), target) if batch_info["batch_idx"] == 0 else batch, batch_info
            )

    given: list[tuple[type[Line], dict[str, Any]]] = [(Line, {"accumulate": 2}), (Bad, {"on_nonfinite": "skip"})]
    for (operator, options), freq in product(given, ("batch", "step")):
        config, settings = {"scheduler": decaying}, TrainingOptions(**options)
        with (
            warnings.catch_warnings(),
            inline(operator, config=config, scheduler_step_freq=freq, options=settings) as trainer,
        ):
            warnings.simplefilter("error")
            trainer.train()
            assert operator_of(trainer).scheduler.last_epoch == (2 if freq == "step" and "accumulate" in options else 3)

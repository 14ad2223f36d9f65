"""Operators from creator functions."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from raysgd import ConfigError, CreatorOperator, TrainingOperator
from tests.torch.small import Line, inline, operator_of


def loader(config: dict[str, Any]) -> Any:
    return Line.loaders(None, config)["train_loader"]  # type: ignore[arg-type]


def model(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(2, 1)


def two_models(config: dict[str, Any]) -> list[nn.Module]:
    return [nn.Linear(2, 1), nn.Linear(2, 1)]


def optimizer(model: nn.Module, config: dict[str, Any]) -> Any:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))


def one_each(models: list[nn.Module], config: dict[str, Any]) -> list[Any]:
    return [optimizer(each, config) for each in models]


def scheduler(optimizer: Any, config: dict[str, Any]) -> Any:
    return StepLR(optimizer, 1, gamma=0.5)


def scaled_loss(config: dict[str, Any]) -> Any:
    return lambda output, target: config["scale"] * nn.functional.mse_loss(output, target)


def test_a_creator_operator_learns() -> None:
    made = TrainingOperator.from_creators(model, optimizer, loader, nn.MSELoss, scheduler)
    assert issubclass(made, CreatorOperator)
    with inline(made, scheduler_step_freq="epoch", config={"lr": 0.2}, seed=1) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(6)]
        operator = operator_of(trainer)
        assert losses[-1] < 0.5 * losses[0]
        assert isinstance(operator.criterion, nn.MSELoss)
        assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**6)


def test_lists_of_models_and_optimizers_are_registered() -> None:
    with inline(TrainingOperator.from_creators(two_models, one_each, loader)) as trainer:
        operator = operator_of(trainer)
        assert len(operator.models) == len(operator.optimizers) == 2
        assert operator.model is operator.models[0]
        assert len(trainer.get_model()) == 2


def test_a_scheduler_creator_without_a_loss_creator_works() -> None:
    made = TrainingOperator.from_creators(model, optimizer, loader, scheduler_creator=scheduler)
    with inline(made, scheduler_step_freq="manual") as trainer:
        operator = operator_of(trainer)
        assert isinstance(operator.scheduler, StepLR)
        assert not hasattr(operator, "criterion")
        with pytest.raises(RuntimeError, match=r"need self\.criterion, or a model"):
            trainer.train()


@pytest.mark.parametrize(("loss", "expected"), [(nn.MSELoss, 1.0), (scaled_loss, 3.0)])
def test_a_loss_class_is_made_and_a_loss_function_gets_the_config(loss: Any, expected: float) -> None:
    with inline(TrainingOperator.from_creators(model, optimizer, loader, loss), config={"scale": 3.0}) as trainer:
        zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        assert float(operator_of(trainer).criterion(zero, one)) == expected


def test_one_or_two_loaders() -> None:
    for make in (loader, lambda config: (loader(config), None)):
        with inline(TrainingOperator.from_creators(model, optimizer, make, nn.MSELoss)) as trainer:
            assert trainer.train()["num_samples"] == 12
            with pytest.raises(ConfigError, match="validation_loader"):
                trainer.validate()
    both = TrainingOperator.from_creators(model, optimizer, lambda config: [loader(config)] * 2, nn.MSELoss)
    with inline(both) as trainer:
        assert trainer.train()["num_samples"] == trainer.validate()["num_samples"] == 12


def test_what_creators_must_be_and_return() -> None:
    made = TrainingOperator.from_creators(model, optimizer, lambda config: [loader(config)] * 3)
    with pytest.raises(ConfigError, match=r"data_creator must return one loader .*, got 3 values"):
        inline(made)
    for name in ("model_creator", "optimizer_creator", "data_creator", "loss_creator", "scheduler_creator"):
        with pytest.raises(ConfigError, match=f"{name} must be a function"):
            TrainingOperator.from_creators(**{"model_creator": model, "optimizer_creator": optimizer, name: 3})


def test_the_order_of_creation() -> None:
    order: list[str] = []

    def noting(name: str, make: Any) -> Any:
        def creator(*given: Any) -> Any:
            order.append(name)
            return make(*given)

        return creator

    made = TrainingOperator.from_creators(
        noting("model", model),
        noting("optimizer", optimizer),
        noting("data", loader),
        noting("loss", lambda config: nn.MSELoss()),
        noting("scheduler", scheduler),
        serialize_data_creation=False,
    )
    inline(made, scheduler_step_freq="epoch").shutdown()
    assert order == ["data", "model", "optimizer", "scheduler", "loss"]


def test_parts_are_read_only() -> None:
    with inline(TrainingOperator.from_creators(model, optimizer, loader, nn.MSELoss)) as trainer:
        for name in ("model", "models", "optimizer", "optimizers", "scheduler", "schedulers", "criterion"):
            with pytest.raises(AttributeError):
                setattr(operator_of(trainer), name, None)

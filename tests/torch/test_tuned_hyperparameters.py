"""Hyperparameters that Tune changes reach the optimizers, but only those that came from the config."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

from raysgd.torch.state.hyperparameters import Option, options, retune
from tests.peek import parts_of


def made(lr: float, scheduler: Any = None) -> Any:
    first = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr, momentum=0.5)
    second = torch.optim.Adam([{"params": nn.Linear(1, 1).parameters(), "lr": 0.3}], lr=lr)
    schedulers = [] if scheduler is None else [scheduler(first)]
    parts = SimpleNamespace(optimizers=[first, second], schedulers=schedulers)
    return SimpleNamespace(_internals=SimpleNamespace(registered=parts, leave_out_warning=lambda text: None))


def test_only_values_from_the_config_are_changed() -> None:
    operator = made(0.1)
    assert options(operator, {"lr": 0.3}) == [Option(1, 0, "lr")]
    assert options(operator, {"lr": 0.2}) == []
    found = options(operator, {"momentum": 0.5, "lr": 0.1, "width": 3})
    assert found == [Option(0, 0, "momentum"), Option(0, 0, "lr")]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: SequentialLR(optimizer, [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.5)], [9]),
    ],
)
def test_a_schedule_continues_from_the_new_value(scheduler: Any) -> None:
    operator = made(0.1, scheduler)
    (schedule,) = parts_of(operator).schedulers
    schedule.step()
    retune(operator, [Option(0, 0, "lr"), Option(0, 0, "momentum")], {"lr": (0.1, 0.4), "momentum": (0.5, 0.9)})
    first, second = parts_of(operator).optimizers
    assert first.param_groups[0]["lr"] == pytest.approx(0.2), "halved once, as before"
    assert first.param_groups[0]["momentum"] == pytest.approx(0.9)
    assert second.param_groups[0]["lr"] == 0.3
    schedule.step()
    assert first.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_value_that_was_zero_can_be_changed() -> None:
    operator = made(0.0)
    retune(operator, [Option(0, 0, "lr")], {"lr": (0.0, 0.4)})
    assert parts_of(operator).optimizers[0].param_groups[0]["lr"] == 0.4

"""Optimizers on the CPU update their parameters together, with the same weights, where the user leaves the choice."""

from typing import Any

import pytest
import torch
from torch import nn

from raysgd.torch.group import wrapping
from raysgd.torch.group.wrapping import update_together

SIZES = (3, 64, 1000, 4097, 5, 6, 7, 8)
KINDS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {}),
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **arguments: object) -> torch.optim.Optimizer:
    return kind(parameters(), lr=0.01, **arguments)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_the_weights_and_gradients_are_equal(kind: type[torch.optim.Optimizer], arguments: dict[str, object]) -> None:
    dtype = torch.float64 if "momentum" in arguments else torch.float32
    plain, together = (kind(parameters(dtype), lr=0.01, **arguments) for _ in range(2))  # type: ignore[arg-type, call-arg]
    update_together([together])
    seen = chosen_in_steps(together)
    for step in range(10):
        seen.clear()
        for each in (plain, together):
            torch.manual_seed(step)
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            each.step()
        assert seen == [True] and together.param_groups[0]["foreach"] is None, "the state is the user's"
        pairs = zip(plain.param_groups[0]["params"], together.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one, other) and torch.equal(one.grad, other.grad) for one, other in pairs)


def chosen_in_steps(made: Any) -> list[Any]:
    """Return a list that gets what the groups have while the optimizer steps."""
    seen: list[Any] = []
    made.register_step_pre_hook(lambda stepping, *_: seen.extend(group["foreach"] for group in stepping.param_groups))
    return seen


def stepped(made: Any) -> list[Any]:
    """Let the library choose, make a step, and return what was chosen for each group."""
    update_together([made])
    seen = chosen_in_steps(made)
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    return seen


def test_what_the_user_has_chosen_or_would_change_gradients_stays() -> None:
    assert stepped(optimizer(foreach=False)) == [False]
    assert stepped(optimizer(fused=True)) == stepped(optimizer(nesterov=True, momentum=0.9)) == [None]


def test_a_rate_may_become_a_tensor() -> None:
    """torch's Adam refuses such a rate with `foreach`, and takes it otherwise."""
    made = optimizer(torch.optim.AdamW)
    assert stepped(made) == [True]
    seen = chosen_in_steps(made)
    made.param_groups[0]["lr"] = torch.tensor(0.01)
    made.step()
    assert seen == [None]


class Own(torch.optim.SGD):
    """A user's optimizer, which may read the options in another way."""


def test_other_optimizers_few_parameters_and_large_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stepped(optimizer(Own)) == stepped(optimizer(torch.optim.Adagrad)) == [None]
    assert stepped(torch.optim.SGD(parameters()[:7], lr=0.01)) == [None]
    assert stepped(torch.optim.SGD(parameters(torch.bfloat16), lr=0.01)) == [None]
    monkeypatch.setattr(wrapping, "LARGEST_TOGETHER", 4 * sum(SIZES) - 1)
    assert stepped(optimizer()) == [None]
    update_together([object()])

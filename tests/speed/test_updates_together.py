"""Optimizers on the CPU update their parameters together, with the same weights, where the user leaves the choice."""

import pytest
import torch
from torch import nn

from raysgd.torch import wrapping
from raysgd.torch.wrapping import update_together

SIZES = (3, 64, 1000, 4097)
KINDS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {}),
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **arguments: object) -> torch.optim.Optimizer:
    return kind(parameters(), lr=0.01, **arguments)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_the_weights_and_gradients_are_equal(
    kind: type[torch.optim.Optimizer], arguments: dict[str, object], dtype: torch.dtype
) -> None:
    plain, together = (kind(parameters(dtype), lr=0.01, **arguments) for _ in range(2))  # type: ignore[arg-type, call-arg]
    update_together([together])
    assert together.param_groups[0]["foreach"] is True and plain.param_groups[0]["foreach"] is None
    for step in range(30):
        for each in (plain, together):
            torch.manual_seed(step)
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            each.step()
        pairs = zip(plain.param_groups[0]["params"], together.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one, other) and torch.equal(one.grad, other.grad) for one, other in pairs)


def test_each_group_is_decided_alone() -> None:
    first, second = parameters(), parameters(torch.bfloat16)
    both = torch.optim.AdamW([{"params": first}, {"params": second}], lr=0.01)
    update_together([both])
    assert [group["foreach"] for group in both.param_groups] == [True, None]


@pytest.mark.parametrize("arguments", [{"foreach": False}, {"fused": True}, {"nesterov": True, "momentum": 0.9}])
def test_what_the_user_has_chosen_or_would_change_gradients_stays(arguments: dict[str, object]) -> None:
    chosen = optimizer(**arguments)
    before = dict(chosen.param_groups[0])
    update_together([chosen])
    assert chosen.param_groups[0] == before


class Own(torch.optim.SGD):
    """A user's optimizer, which may read the options in another way."""


def test_other_optimizers_rates_in_tensors_and_large_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [
        optimizer(Own),
        optimizer(torch.optim.Adagrad),
        torch.optim.Adam(parameters(), lr=torch.tensor(0.01)),
        object(),
    ]
    update_together(kept)
    monkeypatch.setattr(wrapping, "LARGEST_TOGETHER", 4 * sum(SIZES) - 1)
    kept.append(optimizer())
    update_together(kept)
    assert all(group["foreach"] is None for each in kept for group in getattr(each, "param_groups", []))

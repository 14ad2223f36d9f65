"""Checkpoints of another operator, and states that a user changed: each is refused before anything changes, and the next `train()`
works."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.files.torch_cases import Bench, at, replaced, stored


def put(*path: Any) -> Callable[[Any], Callable[[Any], Any]]:
    """Return a function that takes a value, and returns a function that puts the value at this path of a state."""
    return lambda value: lambda state: replaced(state, path, value)


def without(*path: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        inner = copy.copy(at(state, path[:-1]))
        del inner[path[-1]]
        return replaced(state, path[:-1], inner)

    return change


def reshaped(*path: Any) -> Callable[[Any], Any]:
    return lambda state: replaced(state, path, torch.zeros(7))


ADAM, SGD = ("optimizers", 0), ("optimizers", 1)
T = torch.tensor

WRONG: dict[str, Callable[[Any], Any]] = {
    # the state as a whole
    "models: none": without("models"),
    "models: one too few": lambda state: {**state, "models": state["models"][:1]},
    "optimizers: none": without("optimizers"),
    "optimizers: in another order": lambda state: {**state, "optimizers": state["optimizers"][::-1]},
    "schedulers: in another order": lambda state: {**state, "schedulers": state["schedulers"][::-1]},
    "format: a list": put("format")(["raysgd-torch"]),
    "version: text": put("version")("1"),
    "version: infinite": put("version")(float("nan")),
    # models
    "weight: another shape": reshaped("models", 0, "weight"),
    "weight: text": put("models", 0, "weight")("heavy"),
    "weight: integers": put("models", 0, "weight")(torch.ones(3, 2, dtype=torch.int64)),
    "weight: sparse": put("models", 0, "weight")(torch.ones(3, 2).to_sparse()),
    "weight: missing": without("models", 0, "weight"),
    "weight: a name too many": put("models", 0, "extra")(torch.ones(1)),
    "buffer: fractions": put("models", 1, "0.num_batches_tracked")(T(1.5)),
    # optimizers
    "groups: one too few": lambda state: replaced(
        state, (*ADAM, "param_groups"), state["optimizers"][0]["param_groups"][:1]
    ),
    "lr: missing": without(*ADAM, "param_groups", 0, "lr"),
    "names: in another order": lambda state: put(*SGD, "param_groups", 0, "param_names")(
        list(reversed(state["optimizers"][1]["param_groups"][0]["param_names"]))
    )(state),
    "exp_avg: another shape": reshaped(*ADAM, "state", 0, "exp_avg"),
    "momentum_buffer: another shape": reshaped(*SGD, "state", 0, "momentum_buffer"),
    # counters, which users change, and the data
    "global_step: text": put("global_step")("5"),
    "global_step: negative": put("global_step")(-1),
    "epoch: negative": put("epoch")(-2),
    "order: samples that are not here": put("loader", "order")(torch.arange(24) + 1),
    # the operator's own state
    "operator: none": put("operator")(None),
    "operator: half": put("operator")({"best": 0.5}),
    "operator: of another type": put("operator", "best")("x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(here: Bench, name: str) -> None:
    here.refuses(stored(WRONG[name](here.start)))
    here.next_steps_are_right()


def test_an_error_in_the_operators_load_state_dict_undoes_the_load(here: Bench) -> None:
    """The operator's own state is loaded last, after models and optimizers."""
    wrong = replaced(here.after[0], ("operator", "notes"), ["b"])
    wrong = {**here.trainer.state_dict(), **{name: here.after[0][name] for name in ("models", "optimizers")}, **wrong}
    message = here.refuses(stored({**wrong, "position": here.start["position"], "epoch": here.start["epoch"]}))
    assert "this is no state of mine" in message and "load_state_dict" in message
    here.next_steps_are_right()

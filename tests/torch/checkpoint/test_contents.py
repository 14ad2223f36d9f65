"""Checkpoints of another operator, and states that a user changed: each is refused before anything changes, and the next `train()`
works."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR

from raysgd import CheckpointError, TrainingOptions
from tests.local.group import Cluster
from tests.torch.checkpoint.cases import Bench, Rich, at, bench, complete, replaced, same, stored


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
    "format: that of a TFTrainer": put("format")("raysgd-tensorflow"),
    # models
    "weight: another shape": reshaped("models", 0, "weight"),
    "weight: text": put("models", 0, "weight")("heavy"),
    "weight: integers": put("models", 0, "weight")(torch.ones(3, 2, dtype=torch.int64)),
    "weight: sparse": put("models", 0, "weight")(torch.ones(3, 2).to_sparse()),
    "weight: missing": without("models", 0, "weight"),
    "weight: of complex numbers": put("models", 0, "weight")(torch.ones(3, 2, dtype=torch.complex64)),
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
    "groups: none": without(*ADAM, "param_groups"),
    "state: none": without(*ADAM, "state"),
    "state: of a parameter that is not here": put(*ADAM, "state", 9)({"step": T(1.0)}),
    "state: text": put(*ADAM, "state", 0)("adam"),
    "exp_avg: another shape": reshaped(*ADAM, "state", 0, "exp_avg"),
    "exp_avg: missing": without(*ADAM, "state", 0, "exp_avg"),
    "momentum_buffer: another shape": reshaped(*SGD, "state", 0, "momentum_buffer"),
    # schedulers
    "scheduler: text": put("schedulers", 0)("step"),
    "scheduler: no epoch": without("schedulers", 0, "last_epoch"),
    "scheduler: rates of another number of groups": put("schedulers", 0, "base_lrs")([0.02]),
    # counters, which users change, and the data
    "global_step: text": put("global_step")("5"),
    "global_step: negative": put("global_step")(-1),
    "epoch: negative": put("epoch")(-2),
    "position: a list": put("position")([1, 2]),
    "position: a step that is text": put("position", "step")("5"),
    "position: a negative offset": put("position", "offset")(-4),
    "validation_position: text": put("validation_position", "ended")("yes"),
    "loader: a list": put("loader")([]),
    "loader: a generator of another kind": put("loader", "generators")([torch.zeros(3)]),
    "order: samples that are not here": put("loader", "order")(torch.arange(24) + 1),
}
# What only the operator's own `load_state_dict` can notice, which is the last thing that a load changes.
NOT_MINE: dict[str, Callable[[Any], Any]] = {
    "none": put("operator")(None),
    "half": put("operator")({"best": 0.5}),
    "of another type": put("operator", "best")("x"),
    "other notes": put("operator", "notes")(["b"]),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "train": lambda trainer: trainer.train(num_steps=1),
    "validate": lambda trainer: trainer.validate(),
    "state_dict": lambda trainer: trainer.state_dict(),
    "save": lambda trainer: trainer.save("unused.pt"),
    "get_model": lambda trainer: trainer.get_model(),
    "update_scheduler": lambda trainer: trainer.update_scheduler(1.0),
    "apply_all_operators": lambda trainer: trainer.apply_all_operators(str),
    "resize": lambda trainer: trainer.resize(1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(here: Bench, name: str) -> None:
    here.refuses(stored(WRONG[name](here.start)))
    here.next_steps_are_right()


class Planned(Rich):
    """Has schedules of schedules."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        adam, sgd = self.optimizers
        inner = [LambdaLR(adam, [lambda epoch: 1.0] * 2), ConstantLR(adam)]
        schedulers = [SequentialLR(adam, inner, milestones=[3]), ReduceLROnPlateau(sgd)]
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=self.models, optimizers=self.optimizers, criterion=self.criterion, schedulers=schedulers
        )


OPTIONAL: dict[str, Callable[[Any], Any]] = {
    "scaler: a list": put("amp_native")([1.0]),
    "scaler: without its scale": without("amp_native", "scale"),
    "schedulers in one: none": without("schedulers", 0, "_schedulers"),
    "schedulers in one: too few": lambda state: put("schedulers", 0, "_schedulers")(
        state["schedulers"][0]["_schedulers"][:1]
    )(state),
    "schedulers in one: text": put("schedulers", 0, "_schedulers", 1)("constant"),
    "schedulers in one: too many functions": put("schedulers", 0, "_schedulers", 0, "lr_lambdas")([None] * 3),
}


def test_the_state_of_what_is_optional_is_checked(tmp_path: Path) -> None:
    options = TrainingOptions(precision="fp16")
    for here in bench(tmp_path, operator=Planned, options=options):
        for name, wrong in OPTIONAL.items():
            assert "Nothing was changed on any rank" in here.refuses(stored(wrong(here.start))), name
        here.next_steps_are_right()


class Remembering(torch.optim.SGD):
    """Remembers the newest gradients from its second step on."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            first = not self.state[each]
            self.state[each]["newest"] = None if first else each.grad.clone()
        return super().step(closure)


class Own(Rich):
    """Has an optimizer and a parameter group with options that torch does not have."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        first, second = self.models
        own = Remembering(first.parameters(), lr=0.1)
        sgd = torch.optim.SGD([{"params": list(second.parameters()), "scales": (), "stage": 0}], lr=0.1)
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=self.models,
            optimizers=[own, sgd],
            criterion=self.criterion,
            schedulers=[ConstantLR(own), ReduceLROnPlateau(sgd)],
        )


def test_what_users_add_to_optimizers_may_have_any_form(tmp_path: Path) -> None:
    for here in bench(tmp_path, operator=Own):
        state: Any = here.start
        for path, value in (
            ((*ADAM, "state", 0, "newest"), None),
            ((*SGD, "param_groups", 0, "scales"), (0.5, 0.25)),
            ((*SGD, "param_groups", 0, "stage"), "last"),
        ):
            state = put(*path)(value)(state)
        here.trainer.load_state_dict(state)
        assert same(here.trainer.state_dict()["optimizers"], state["optimizers"])
        here.trainer.train(num_steps=1)


def test_ctrl_c_in_a_load_leaves_the_state_undefined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is the script's process, and cannot say what it has changed."""

    def interrupted(self: Any, state: Any) -> None:
        raise KeyboardInterrupt

    for here in bench(tmp_path):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Rich, "load_state_dict", interrupted)
            here.trainer.load_state_dict(here.start)
        with pytest.raises(CheckpointError, match=r"^the state of this trainer is undefined"):
            here.trainer.train()
        here.back()
        here.next_steps_are_right()


def test_no_worker_loads_what_one_refuses(tmp_path: Path) -> None:
    with Cluster():
        for two in bench(tmp_path, num_workers=2):
            assert len(two.before) == 3, "the content, and what each worker has"
            for name, wrong in WRONG.items():
                assert "Nothing was changed on any rank" in two.refuses(stored(wrong(two.start))), name
            two.next_steps_are_right()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", NOT_MINE)
def test_after_an_error_in_load_state_dict_only_a_load_is_accepted(name: str, workers: int, tmp_path: Path) -> None:
    with Cluster() if workers > 1 else nullcontext():
        for each in bench(tmp_path, num_workers=workers):
            trainer, path, wrong = each.trainer, tmp_path / "wrong.pt", NOT_MINE[name](each.start)
            path.write_bytes(stored(wrong))
            for load in (partial(trainer.load, path), partial(trainer.load_state_dict, wrong)):
                with pytest.raises(
                    CheckpointError, match=r"in load_state_dict.*Now the state of this trainer is undefined"
                ):
                    load()
                for call in CALLS.values():
                    with pytest.raises(
                        CheckpointError, match=r"^the state of this trainer is undefined.*Only load\(\)"
                    ):
                        call(trainer)
                with pytest.raises(
                    CheckpointError, match=r"weight has shape.*Now the state of this trainer is undefined"
                ):
                    trainer.load_state_dict(WRONG["weight: another shape"](each.start))
                trainer.load_state_dict(each.start)
                assert same(complete(trainer), each.before)
            each.next_steps_are_right()

"""Well-formed files with wrong values and correct checksums: each is refused before anything changes, or it loads. The next
`train()` works in both cases."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.files.torch_cases import Bench, at, bench, leaves, replaced, stored
from tests.tiers import NIGHTLY


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("contents"))


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
STEP, PLATEAU = ("schedulers", 0), ("schedulers", 1)
RNG = ("rng", 0)
T = torch.tensor

WRONG: dict[str, Callable[[Any], Any]] = {
    # the state as a whole
    "models: none": without("models"),
    "models: a dictionary": put("models")({}),
    "models: one too few": lambda state: {**state, "models": state["models"][:1]},
    "models: a number": put("models", 0)(3),
    "optimizers: none": without("optimizers"),
    "optimizers: a number": put("optimizers")(3),
    "optimizers: in another order": lambda state: {**state, "optimizers": state["optimizers"][::-1]},
    "schedulers: none": without("schedulers"),
    "schedulers: text": put("schedulers")("xy"),
    "schedulers: in another order": lambda state: {**state, "schedulers": state["schedulers"][::-1]},
    "format: a list": put("format")(["raysgd-torch"]),
    "version: text": put("version")("1"),
    "version: a tensor": put("version")(torch.ones(3)),
    "version: infinite": put("version")(float("nan")),
    # models
    "weight: another shape": reshaped("models", 0, "weight"),
    "weight: turned": lambda state: replaced(state, ("models", 0, "weight"), state["models"][0]["weight"].T),
    "weight: text": put("models", 0, "weight")("heavy"),
    "weight: a list": put("models", 0, "weight")([[1.0, 2.0]] * 3),
    "weight: integers": put("models", 0, "weight")(torch.ones(3, 2, dtype=torch.int64)),
    "weight: complex": put("models", 0, "weight")(torch.ones(3, 2, dtype=torch.complex64)),
    "weight: sparse": put("models", 0, "weight")(torch.ones(3, 2).to_sparse()),
    "weight: quantized": put("models", 0, "weight")(torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8)),
    "weight: missing": without("models", 0, "weight"),
    "weight: a name too many": put("models", 0, "extra")(torch.ones(1)),
    "weight: a name that is a number": put("models", 0, 5)(torch.ones(1)),
    "buffer: another shape": reshaped("models", 1, "0.running_mean"),
    "buffer: fractions": put("models", 1, "0.num_batches_tracked")(T(1.5)),
    # optimizers
    "groups: missing": without(*ADAM, "param_groups"),
    "groups: text": put(*ADAM, "param_groups")("xy"),
    "groups: one too few": lambda state: replaced(
        state, (*ADAM, "param_groups"), state["optimizers"][0]["param_groups"][:1]
    ),
    "groups: a number": put(*ADAM, "param_groups", 0)(1),
    "params: text": put(*ADAM, "param_groups", 0, "params")("x"),
    "params: exchanged": lambda state: put(*ADAM, "param_groups", 0, "params")([1])(
        put(*ADAM, "param_groups", 1, "params")([0])(state)
    ),
    "params: twice": put(*ADAM, "param_groups", 1, "params")([0]),
    "params: lists": put(*ADAM, "param_groups", 0, "params")([[0]]),
    "lr: text": put(*ADAM, "param_groups", 0, "lr")("0.1"),
    "lr: none": put(*ADAM, "param_groups", 0, "lr")(None),
    "lr: missing": without(*ADAM, "param_groups", 0, "lr"),
    "lr: a list": put(*ADAM, "param_groups", 0, "lr")([0.1]),
    "lr: a tensor of several": put(*ADAM, "param_groups", 0, "lr")(torch.ones(2)),
    "lr: true": put(*ADAM, "param_groups", 0, "lr")(True),
    "betas: a number": put(*ADAM, "param_groups", 0, "betas")(0.9),
    "betas: three": put(*ADAM, "param_groups", 0, "betas")((0.9, 0.9, 0.9)),
    "betas: text": put(*ADAM, "param_groups", 0, "betas")((0.9, "x")),
    "betas: out of range": put(*ADAM, "param_groups", 0, "betas")((0.9, 5.0)),
    "betas: one": put(*ADAM, "param_groups", 0, "betas")((1.0, 0.999)),
    "momentum: text": put(*SGD, "param_groups", 0, "momentum")("x"),
    "nesterov: text": put(*SGD, "param_groups", 0, "nesterov")("no"),
    "foreach: text": put(*SGD, "param_groups", 0, "foreach")("x"),
    "state: missing": without(*ADAM, "state"),
    "state: a list": put(*ADAM, "state")([1]),
    "state: of an unknown parameter": put(*ADAM, "state", 9)({}),
    "state: named by text": put(*ADAM, "state", "0")({}),
    "state: a number": put(*ADAM, "state", 0)(1),
    "exp_avg: another shape": reshaped(*ADAM, "state", 0, "exp_avg"),
    "exp_avg: one value": put(*ADAM, "state", 0, "exp_avg")(T(1.0)),
    "exp_avg: broadcastable": put(*ADAM, "state", 0, "exp_avg")(torch.ones(1, 2)),
    "exp_avg: text": put(*ADAM, "state", 0, "exp_avg")("x"),
    "exp_avg: missing": without(*ADAM, "state", 0, "exp_avg"),
    "exp_avg: integers": put(*ADAM, "state", 0, "exp_avg")(torch.ones(3, 2, dtype=torch.int64)),
    "step: text": put(*ADAM, "state", 0, "step")("5"),
    "step: negative": put(*ADAM, "state", 0, "step")(T(-1.0)),
    "step: infinite": put(*ADAM, "state", 0, "step")(T(float("inf"))),
    "step: several": put(*ADAM, "state", 0, "step")(torch.ones(2)),
    "step: a number among tensors": put(*ADAM, "state", 0, "step")(5),
    "momentum_buffer: another shape": reshaped(*SGD, "state", 0, "momentum_buffer"),
    "momentum_buffer: text": put(*SGD, "state", 0, "momentum_buffer")("x"),
    # schedulers
    "last_epoch: text": put(*STEP, "last_epoch")("3"),
    "last_epoch: none": put(*STEP, "last_epoch")(None),
    "step_size: nothing": put(*STEP, "step_size")(0),
    "gamma: text": put(*STEP, "gamma")("x"),
    "base_lrs: a number": put(*STEP, "base_lrs")(0.1),
    "base_lrs: one too few": put(*STEP, "base_lrs")([0.1]),
    "base_lrs: text": put(*STEP, "base_lrs")(["x", "y"]),
    "best: text": put(*PLATEAU, "best")("x"),
    "num_bad_epochs: a list": put(*PLATEAU, "num_bad_epochs")([]),
    "mode: a number": put(*PLATEAU, "mode")(3),
    "step: no function": put(*STEP, "step_size")("x"),
    "made_for_steps: a tuple": put(*STEP, "_made_for_steps")((0.4,)),
    "made_for_steps: negative": put(*STEP, "_made_for_steps")(-1),
    "made_for_workers: text": put(*STEP, "_made_for_workers")("2"),
    "workers_differed: none": put(*STEP, "_workers_differed")(None),
    # counters and the position in the data
    "global_step: text": put("global_step")("5"),
    "global_step: negative": put("global_step")(-1),
    "global_step: a fraction": put("global_step")(1.5),
    "global_step: huge": put("global_step")(10**400),
    "global_step: true": put("global_step")(True),
    "epoch: text": put("epoch")("one"),
    "epoch: negative": put("epoch")(-2),
    "world_size: nothing": put("world_size")(0),
    "position: a list": put("position")([1, 2]),
    "position: a number": put("position")(5),
    "offset: negative": put("position", "offset")(-4),
    "offset: text": put("position", "offset")("4"),
    "offset: a fraction": put("position", "offset")(4.5),
    "offset: a tensor": put("position", "offset")(T(4)),
    "offset: huge": put("position", "offset")(1 << 80),
    "ended: text": put("position", "ended")("no"),
    "ended: a number": put("position", "ended")(0),
    "plan: text": put("position", "plan")("text"),
    "plan: too short": put("position", "plan")([21, 3]),
    "plan: steps without samples": put("position", "plan")([21, 3, 2, 52, 0, False]),
    "planned: negative": put("position", "planned")(-1),
    "parked: a number": put("position", "parked")(5),
    "parked: text": put("position", "parked")(["a", "b", "c"]),
    "step of the position: none": put("position", "step")(None),
    "epoch of the position: text": put("position", "epoch")("x"),
    "in no epoch": lambda state: put("epoch")(0)(put("position", "epoch")(0)(state)),
    "validation_position: text": put("validation_position")("x"),
    "validation_began: a list": put("validation_began")([1]),
    "loader: a number": put("loader")(3),
    "order: text": put("loader", "order")("abc"),
    "order: fractions": put("loader", "order")(torch.ones(24)),
    "order: a table": put("loader", "order")(torch.zeros(4, 6, dtype=torch.int64)),
    "order: samples that are not here": put("loader", "order")(torch.arange(24) + 1),
    "order: batches": put("loader", "order")([[0, 1], [2, 3]]),
    "generators: a number": put("loader", "generators")(3),
    "generators: text": put("loader", "generators")(["x"]),
    "generators: too short": put("loader", "generators")([torch.zeros(5, dtype=torch.uint8)]),
    "generators: nonsense": put("loader", "generators")([torch.full((5056,), 255, dtype=torch.uint8)]),
    # random states
    "rng: a number": put("rng")(3),
    "rng: of numbers": put("rng")([3]),
    "rng: without python's": without(*RNG, "python"),
    "python: too short": put(*RNG, "python")([3, [1, 2], None]),
    "python: text": put(*RNG, "python")([3, ["x"] * 625, None]),
    "python: another version": put(*RNG, "python", 0)(7),
    "python: gauss as text": put(*RNG, "python", 2)("x"),
    "torch: too short": put(*RNG, "torch")(torch.zeros(3, dtype=torch.uint8)),
    "torch: fractions": put(*RNG, "torch")(torch.zeros(5056)),
    "torch: nonsense": put(*RNG, "torch")(torch.full((5056,), 255, dtype=torch.uint8)),
    "torch: none": put(*RNG, "torch")(None),
    "numpy: another kind": put(*RNG, "numpy", 0)("SFC64"),
    "numpy: too short": put(*RNG, "numpy", 1)(torch.zeros(3, dtype=torch.int64)),
    "numpy: negative": put(*RNG, "numpy", 1)(torch.full((624,), -1)),
    "numpy: position as text": put(*RNG, "numpy", 2)("x"),
    "numpy: cached as text": put(*RNG, "numpy", 4)("x"),
    # the operator's own state
    "operator: none": put("operator")(None),
    "operator: a number": put("operator")(3),
    "operator: half": put("operator")({"best": 0.5}),
    "operator: of another type": put("operator", "best")("x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_refused_and_change_nothing(here: Bench, name: str) -> None:
    here.tally.clear()
    here.try_file(stored(WRONG[name](here.start)))
    assert here.tally["rejected"] == 1
    here.next_steps_are_right()


def versions(**entry: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        model = OrderedDict(state["models"][1])
        model._metadata = {"": {"version": 1}, "0": entry}  # type: ignore[attr-defined]
        return replaced(state, ("models", 1), model)

    return change


def shadowed(state: Any) -> Any:
    """Return the state with a dictionary that has an attribute in place of a method."""
    model = OrderedDict(state["models"][1])
    model.__dict__["keys"] = "none"
    return replaced(state, ("models", 1), model)


ODD: dict[str, Callable[[Any], Any]] = {
    "version of a module as text": versions(version="2"),
    "a module that exchanges its parameters": versions(version=2, assign_to_params_buffers=True),
    "a method that is text": shadowed,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_structures_are_refused(here: Bench, name: str) -> None:
    here.tally.clear()
    here.try_file(stored(ODD[name](here.start)))
    assert here.tally["rejected"] == 1


VALUES: list[Callable[[random.Random], Any]] = [
    lambda chance: None,
    lambda chance: chance.choice([True, False]),
    lambda chance: chance.choice([0, -1, 1, 5, 1 << 40, -(1 << 70), 10**400]),
    lambda chance: chance.choice([0.0, -1.5, 1e300, float("nan"), float("inf")]),
    lambda chance: chance.choice(["", "x", "0", "é" * 300]),
    lambda chance: [chance.randrange(9) for _ in range(chance.randrange(4))],
    lambda chance: tuple(chance.random() for _ in range(chance.randrange(4))),
    lambda chance: {chance.choice(["a", "step", 0]): 1},
    lambda chance: b"bytes",
    lambda chance: {1, 2},
    lambda chance: 2 + 3j,
    lambda chance: torch.full(chance.choice([(), (1,), (3,), (0,), (2, 2)]), chance.random()),
    lambda chance: torch.zeros(chance.choice([(), (3,), (625,)]), dtype=chance.choice([torch.int64, torch.uint8])),
]


def mutated(state: Any, paths: list[tuple[Any, ...]], chance: random.Random) -> tuple[tuple[Any, ...], Any]:
    """Return the state with one value replaced by one of another type or shape, or out of range."""
    path = chance.choice(paths)
    return path, replaced(state, path, chance.choice(VALUES)(chance))


@pytest.mark.nightly
def test_any_replaced_value_is_refused_or_loads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The file is refused without a change, or it loads. The next train() works."""
    for here in bench(tmp_path_factory.mktemp("fuzz")):
        chance = random.Random(20)
        # With a beta of -1, which is a number like others, torch's Adam divides by 0 in every second step.
        every = [path for path in leaves(here.start) if path and "betas" not in path]
        # The random states have so many numbers that almost nothing else would be tried.
        few = [path for path in every if path[0] != "rng" or len(path) < 5]
        for _ in range(10_000 if NIGHTLY else 400):
            path, state = mutated(here.start, few if chance.random() < 0.95 else every, chance)
            if here.try_file(stored(state)) in ("identical", "silent difference"):
                here.trainer.load(here.folder / "tried.pt")
                try:
                    here.trainer.train(num_steps=2)
                except Exception as error:
                    raise AssertionError(f"{path} = {at(state, path)!r:.200} broke train(): {error!r}") from error
                here.back()
                here.refresh()
        counts = here.report("any value replaced").replace("silent difference", "another value, taken")
        print("\n" + counts)
        assert here.tally["rejected"] > 100 and here.tally["silent difference"] > 10


def test_an_error_in_the_operators_load_state_dict_undoes_the_load(here: Bench) -> None:
    """The operator's own state is loaded last, after models and optimizers."""
    here.tally.clear()
    wrong = replaced(here.after[0], ("operator", "notes"), ["b"])
    wrong = {**here.trainer.state_dict(), **{name: here.after[0][name] for name in ("models", "optimizers")}, **wrong}
    message = here.try_file(stored({**wrong, "position": here.start["position"], "epoch": here.start["epoch"]}))
    assert "this is no state of mine" in message and "load_state_dict" in message
    here.next_steps_are_right()

"""What ranks report of their weights, how it is compared, and what follows. No processes."""

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TrainingOptions
from raysgd.core.outcomes import Ok
from raysgd.core.protocols import Call
from raysgd.engine.rank_comparison import Comparison, difference
from raysgd.errors import ConfigError
from raysgd.torch.settings import TorchSettings
from raysgd.torch.state.rank_comparison import sums_of
from tests.peek import parts_of


def operator(model: nn.Module, **attributes: Any) -> Any:
    """Return what is read of an operator."""
    parts = SimpleNamespace(models=[model], wrapped=[model], criterion=None)
    return SimpleNamespace(model=model, _internals=SimpleNamespace(registered=parts), **attributes)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))


def found(*operators: Any) -> str:
    return difference([sums_of(each, parts_of(each)) for each in operators])


def changed(change: Callable[[Any], Any], model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other


# -- what is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight[3, 5].neg_(),
        lambda model: model[0].weight.mul_(1.001),
        lambda model: model[0].weight[0, 0].fill_(torch.nan),
    ],
    ids=["a sign", "a factor", "a value that is NaN"],
)
def test_a_parameter_that_differs_on_one_of_three_ranks(change: Callable[[Any], Any]) -> None:
    model = net()
    text = found(operator(model), operator(changed(change, model)), operator(copy.deepcopy(model)))
    assert text.startswith("0.weight of self.model differs between ranks 0, 2 and rank 1 ") and "more" not in text


def test_the_size_is_about_that_of_the_difference() -> None:
    model = net()
    text = found(operator(model), operator(changed(lambda model: model[0].weight.mul_(1.01), model)))
    size = float(text.split()[-4])
    assert 0.005 < size < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(20_007, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert found(operator(model), operator(copy.deepcopy(model))) == ""
    text = found(operator(model), operator(changed(lambda model: model.weight[4096:].mul_(1.1), model)))
    assert text.startswith("weight of self.model ")


def test_a_parameter_in_another_memory_format() -> None:
    convolution = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    assert not convolution.weight.is_contiguous()
    other = changed(lambda model: model.weight[5, 6, 1, 2].neg_(), convolution)
    assert found(operator(convolution), operator(other)).startswith("weight of self.model ")


def test_buffers_are_not_compared() -> None:
    model = net()
    assert found(operator(model), operator(changed(lambda model: model[1].running_mean.add_(1.0), model))) == ""


def test_a_module_that_is_not_registered() -> None:
    """Only what trains: a frozen module can be of one rank only."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    first = operator(net(), head=one, teacher=frozen[0], inner=nn.ReLU())
    second = operator(net(), head=other, teacher=frozen[1], inner=nn.ReLU())
    text = found(first, second)
    assert "of self.head, which belongs to no registered model and is therefore not averaged, differs" in text
    assert text.endswith(" (and 1 more)")


def test_a_module_around_a_registered_one_is_not_another_one() -> None:
    assert found(*(operator(model, both=nn.ModuleList([model])) for model in (net(), net()))) == ""


def test_entries_that_only_some_ranks_have_are_compared_among_these() -> None:
    entries = [{"w": [1.0, 1.0, 1e-4]}, {"v": [5.0, 1.0, 1e-4]}, {"w": [1.5, 1.0, 1e-4]}]
    assert "differs between rank 0 and rank 2" in difference([json.dumps(each) for each in entries])


# -- what is not --------------------------------------------------------------------------------------


def test_processors_that_round_differently_do_not_reach_the_tolerance() -> None:
    """One rounds after the multiplication and after the sum, the other one once, as a fused multiply-add does."""
    generator = np.random.default_rng(0)
    one, moment = generator.standard_normal(4096).astype(np.float32), np.zeros(4096, np.float32)
    other = one.copy()
    for _ in range(5000):
        gradient = generator.standard_normal(4096).astype(np.float32)
        moment = np.float32(0.9) * moment + gradient
        one = one - np.float32(0.003) * moment
        other = (other.astype(np.float64) - np.float64(np.float32(0.003)) * moment).astype(np.float32)
    assert (one != other).mean() > 0.5
    ranks = [operator(nn.Linear(64, 64, bias=False)) for _ in range(2)]
    for each, weights in zip(ranks, (one, other), strict=True):
        each.model.load_state_dict({"weight": torch.from_numpy(weights.reshape(64, 64))})
    assert found(*ranks) == ""


def test_a_bias_near_zero_may_differ_by_the_rounding_of_larger_values() -> None:
    ranks = [operator(net()) for _ in range(2)]
    for each, value in zip(ranks, (1e-8, 4e-8), strict=True):
        nn.init.constant_(each.model[2].bias, value)
    assert found(*ranks) == ""


# -- when, and what follows ---------------------------------------------------------------------------


def texts(*sizes: float) -> list[str]:
    return [json.dumps({"w": [size, 1.0, 1e-4]}) for size in sizes]


def test_a_comparison_takes_at_most_half_a_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took, members = 0.0, 0.05, ["a", "b"]

    def ask(table: Any, workers: list[str], *_: Any, **limits: Any) -> dict[str, Ok]:
        nonlocal now
        now += took
        return {worker: Ok() for worker in workers}

    monkeypatch.setattr("raysgd.engine.rank_comparison.ask", ask)
    table: Any = SimpleNamespace(members=lambda: members, clock=lambda: now)
    generation: Any = SimpleNamespace(limits=SimpleNamespace(hang_s=1.0), number=1)
    made = Comparison(ElasticConfig())

    def is_compared(seconds: float) -> bool:
        return [*made.ask_ranks(table, generation, Call(len), seconds)] == members

    assert is_compared(0.0), "the first call"
    assert not is_compared(9.9)
    took = 30.0  # the machine is busy, once
    assert is_compared(0.2)
    took = 0.05
    assert not is_compared(19.9)
    assert is_compared(0.2)
    made.note_change()
    assert is_compared(0.0)
    members = ["a"]
    assert made.ask_ranks(table, generation, Call(len), 1e9) == {}, "one worker has nothing to compare"


def test_a_difference_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made, logged = Comparison(ElasticConfig()), []
    for given in (texts(1.0, 1.0), texts(1.0, 1.01), texts(1.0, 1.5), texts(1.0, 1.0)):
        caplog.clear()
        made.judge(4, given)
        logged.append(len(caplog.records))
    assert logged == [0, 1, 0, 0]


# -- arguments ----------------------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="on_divergence must be 'warn', 'raise' or None, got 'evict'"):
        ElasticConfig(on_divergence="evict")  # type: ignore[arg-type]


def test_it_is_refused_where_it_cannot_be_done() -> None:
    from raysgd.train import Trainer

    with pytest.raises(ConfigError, match="and a training function owns its models, so nothing else knows them"):
        Trainer(backend="torch", num_workers=1, elastic=ElasticConfig(on_divergence="raise"))

    def check(options: TrainingOptions, on_divergence: Literal["raise"] | None) -> None:
        elastic = ElasticConfig(on_divergence=on_divergence)
        TorchSettings(num_workers=2, options=options, elastic=elastic).check(None, "auto")

    unwrapped = TrainingOptions().resolved(wrap_ddp=False)
    with pytest.raises(ConfigError, match="with parallel=None raysgd does not know whether they should be equal"):
        check(unwrapped, "raise")
    check(unwrapped, None)
    with pytest.raises(ConfigError, match="with parallel='fsdp' no two ranks have the same ones"):
        check(TrainingOptions(parallel="fsdp"), "raise")

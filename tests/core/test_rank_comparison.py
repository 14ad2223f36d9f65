"""What ranks report of their weights and settings, how it is compared, and what follows. No processes."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TrainingOptions
from raysgd.core.rank_comparison import Summary, compare, describe
from raysgd.engine.rank_comparison import Comparison
from raysgd.errors import ConfigError
from raysgd.torch.rank_comparison import summary_of
from raysgd.training.rank_comparison import BLOCK
from tests.peek import parts_of


def operator(model: nn.Module, *, lr: Any = 0.1, **attributes: Any) -> Any:
    """Return what is read of an operator."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    parts = SimpleNamespace(models=[model], wrapped=[model], optimizers=[optimizer], criterion=None)
    return SimpleNamespace(model=model, optimizer=optimizer, _internals=SimpleNamespace(parts=parts), **attributes)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))


def found(*operators: Any) -> list[Any]:
    return compare({rank: summary_of(each, parts_of(each)).as_text() for rank, each in enumerate(operators)})


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
        lambda model: model[0].weight.copy_(model[0].weight.flip(0)),
        lambda model: model[0].weight.mul_(1.001),
        lambda model: model[0].weight[0, 0].fill_(torch.nan),
    ],
    ids=["a sign", "rows that change places", "a factor", "a value that is NaN"],
)
def test_a_parameter_that_differs_on_one_of_three_ranks(change: Callable[[Any], Any]) -> None:
    model = net()
    (difference,) = found(operator(model), operator(changed(change, model)), operator(copy.deepcopy(model)))
    assert (difference.kind, difference.name) == ("weights", "0.weight of self.model")
    assert difference.groups == ((0, 2), (1,))
    assert difference.others == 0


def test_the_size_is_about_that_of_the_difference() -> None:
    model = net()
    (difference,) = found(operator(model), operator(changed(lambda model: model[0].weight.mul_(1.01), model)))
    assert 0.005 < difference.size < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(5 * BLOCK + 7, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert found(operator(model), operator(copy.deepcopy(model))) == []
    (difference,) = found(operator(model), operator(changed(lambda model: model.weight[BLOCK:].mul_(1.1), model)))
    assert difference.name == "weight of self.model"


def test_a_parameter_in_another_memory_format() -> None:
    convolution = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    assert not convolution.weight.is_contiguous()
    other = changed(lambda model: model.weight[5, 6, 1, 2].neg_(), convolution)
    assert [each.name for each in found(operator(convolution), operator(other))] == ["weight of self.model"]


def test_buffers_are_not_compared() -> None:
    model = net()
    assert found(operator(model), operator(changed(lambda model: model[1].running_mean.add_(1.0), model))) == []


def test_a_module_that_is_not_registered() -> None:
    """Only what trains: a frozen module can be of one rank only."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    first = operator(net(), head=one, teacher=frozen[0], inner=nn.ReLU())
    second = operator(net(), head=other, teacher=frozen[1], inner=nn.ReLU())
    (difference,) = found(first, second)
    assert (difference.kind, difference.others) == ("alone", 1)
    assert difference.name in ("weight of self.head", "bias of self.head")
    assert "which belongs to no registered model and is therefore not averaged" in describe([difference], 3)


def test_a_module_around_a_registered_one_is_not_another_one() -> None:
    assert found(*(operator(model, both=nn.ModuleList([model])) for model in (net(), net()))) == []


def test_the_only_number_of_a_model_is_not_a_setting() -> None:
    """It is among its optimizer's `params`."""
    model = nn.Linear(1, 1, bias=False)
    differences = found(operator(model), operator(changed(lambda model: model.weight.mul_(1.1), model)))
    assert [each.kind for each in differences] == ["weights"]


def test_settings() -> None:
    first, second = operator(net()), operator(net(), lr=torch.tensor(0.2))
    (difference,) = found(first, second)
    assert difference.name == "lr of self.optimizer (SGD)"
    assert [round(value, 4) for value in difference.values] == [0.1, 0.2]
    text = describe([difference], 5)
    assert text.startswith(
        "after step 5 the ranks do not train the same model: lr of self.optimizer (SGD) is 0.1 on rank 0, 0.2"
    )
    for cause in ("self.model.module(x)", "not passed to register()", "a setting, or other code, depends on the rank"):
        assert cause in text


def test_objects_among_the_settings_are_not_compared() -> None:
    ranks = [operator(net()), operator(net())]
    for each in ranks:
        each.optimizer.param_groups[0]["closure"] = object()
    assert found(*ranks) == []


def test_entries_that_only_some_ranks_have_are_compared_among_these() -> None:
    """With FSDP, ranks with the same shard have equal weights."""
    entries = [{"w, shard 0": [1.0, 1.0, 1e-4]}, {"w, shard 1": [5.0, 1.0, 1e-4]}, {"w, shard 0": [1.5, 1.0, 1e-4]}]
    (difference,) = compare({rank: Summary(each, {}, {}).as_text() for rank, each in enumerate(entries)})
    assert difference.groups == ((0,), (2,))


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
    assert found(*ranks) == []


def test_a_bias_near_zero_may_differ_by_the_rounding_of_larger_values() -> None:
    ranks = [operator(net()) for _ in range(2)]
    for each, value in zip(ranks, (1e-8, 4e-8), strict=True):
        nn.init.constant_(each.model[2].bias, value)
    assert found(*ranks) == []


# -- when, and what follows ---------------------------------------------------------------------------


def texts(*sizes: float, rate: float = 0.1) -> list[str]:
    return [Summary({"w": [size, 1.0, 1e-4]}, {}, {"lr": rate}).as_text() for size in sizes]


def test_a_comparison_takes_at_most_half_a_percent_of_the_time() -> None:
    made = Comparison(ElasticConfig())
    assert made.is_due  # the first call
    made.note_asking(0.05)
    made.note_training(9.9)
    assert not made.is_due
    made.note_training(0.2)
    assert made.is_due
    made.note_asking(30.0)  # the machine was busy, once
    made.note_training(20.1)
    assert made.is_due


def test_each_kind_of_difference_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made, logged = Comparison(ElasticConfig()), []
    for given in (
        texts(1.0, 1.01),
        texts(1.0, 1.5),
        texts(1.0, 1.0),
        texts(1.0, 1.01),
        [*texts(1.0), *texts(1.0, rate=0.2)],
    ):
        caplog.clear()
        made.judge(4, given)
        logged.append(len(caplog.records))
    assert logged == [1, 0, 0, 0, 1]


# -- arguments ----------------------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="on_divergence must be 'warn', 'raise' or None, got 'evict'"):
        ElasticConfig(on_divergence="evict")  # type: ignore[arg-type]


def test_it_is_refused_where_it_cannot_be_done() -> None:
    from raysgd.train import Trainer

    with pytest.raises(ConfigError, match="and a training function owns its models, so nothing else knows them"):
        Trainer(backend="torch", num_workers=1, elastic=ElasticConfig(on_divergence="raise"))
    unwrapped = TrainingOptions().resolved(wrap_ddp=False)
    with pytest.raises(ConfigError, match="with parallel=None raysgd does not know whether they should be equal"):
        unwrapped.check_with(num_workers=2, use_gpu=False, elastic=ElasticConfig(on_divergence="raise"))
    unwrapped.check_with(num_workers=2, use_gpu=False, elastic=ElasticConfig(on_divergence=None))

"""`ElasticConfig(lr=...)`: learning rates follow the number of workers, and return exactly."""

from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ConfigError, ElasticConfig
from raysgd.tf import TFTrainer
from raysgd.train import Trainer
from tests.local.runs import train
from tests.replicas import torch_rank
from tests.torch.small import inline
from tests.torch.test_exact_gradients import Curve, close
from tests.torch.test_operator_loops import WithOther

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")


def rate_of(operator: Any) -> float:
    return operator.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("rule", "half", "more"), [("linear", 0.5, 1.5), ("sqrt", 0.5**0.5, 1.5**0.5), (None, 1, 1)])
def test_weights_equal_those_of_a_loop_with_these_rates(rule: Any, half: float, more: float) -> None:
    adam = rule == "sqrt"
    shown: list[float] = []
    mine = train(
        Curve,
        {"rows": 44, "batch": 2, "adam": adam},
        [(2, 4), (2, 2), (1, 6), (None, 4)],
        lr=rule,
        look=lambda trainer, results: shown.append(trainer.apply_all_operators(rate_of)[0]),
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    base = 0.02 if adam else 0.2
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=base, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=base)
    x = torch.randn(44, 3, generator=torch.Generator().manual_seed(7)).double()
    y, start, rate, expected = (3 * x).sin().sum(1, keepdim=True), 0, base, []
    for size, factor in [(8, 1), (8, 1), (4, half), (4, half), (12, more), (8, 1)]:
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[start : start + size]), y[start : start + size]).backward()
        optimizer.step()
        start, rate = start + size, rate * 0.9
        expected.append(rate)
    close(mine, nn.utils.parameters_to_vector(model.parameters()).detach())
    assert shown == [expected[step] for step in (1, 3, 4, 5)], "groups hold the rates of the schedule"


def with_one_of_two(kind: Any, **config: Any) -> Any:
    elastic = ElasticConfig(lr="linear", snapshot_every=None)
    return torch_rank(kind, config, ranks=1, num_workers=2, elastic=elastic, scheduler_step_freq="batch")


def test_a_step_that_raises_leaves_no_factor_behind() -> None:
    rank = with_one_of_two(Curve, rows=4, batch=2)
    seen: list[float] = []

    def fail(*_: Any) -> None:
        seen.append(rate_of(rank.operator))
        raise ZeroDivisionError

    failing = rank.operator.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        rank.train(1)
    failing.remove()
    assert (seen, rate_of(rank.operator)) == ([0.1], 0.2)


def test_where_rates_are_not_scaled() -> None:
    with pytest.raises(ConfigError, match=r"lr must be 'linear', 'sqrt' or None, got 'square'"):
        ElasticConfig(lr="square")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is for TorchTrainer: a training function owns its optimizers"):
        Trainer(backend="torch", num_workers=1, elastic=ElasticConfig(lr="sqrt"))
    pytest.importorskip("tensorflow")
    with pytest.raises(ConfigError, match="is for TorchTrainer: a batch of a TensorFlow data set"):
        TFTrainer(lambda config: None, lambda config: None, elastic=ElasticConfig(lr="sqrt"))


def test_a_number_is_no_rule_and_one_worker_has_no_use_for_one(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"got 0.1. The learning rate itself is an argument of the optimizer"):
        ElasticConfig(lr=0.1)  # type: ignore[arg-type]
    inline(elastic=ElasticConfig(lr="sqrt")).shutdown()
    assert "ElasticConfig(lr='sqrt') has no effect with num_workers=1" in caplog.messages[0]


@pytest.mark.parametrize(("batch", "lines"), [("auto", 1), ("per_worker", 0)])
def test_the_log_says_that_workers_keep_their_batches(batch: Any, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    train(Curve, {"rows": 8, "batch": 2}, [(None, 2)], lr="linear", batch=batch)
    said = [each for each in caplog.messages if "lr='linear' scales the learning rates for each worker's batch" in each]
    assert len(said) == lines == len(caplog.messages)


def test_an_optimizer_without_hooks_is_refused() -> None:
    with pytest.raises(ConfigError, match="got a NotOfTorch, which has no register_step_post_hook"):
        with_one_of_two(WithOther)

"""Learning rate, gradient norm, throughput and model summary, against values computed by hand."""

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from raysgd.callbacks import (
    EMA,
    Callback,
    CallResult,
    GradientNormMonitor,
    LearningRateMonitor,
    PrintCallback,
    Run,
    Throughput,
)
from tests.callbacks.recording import called_by_a_trainer
from tests.callbacks.test_averages import Two
from tests.torch.small import Line, inline, rows


class Stepped(Line):
    """Halves its learning rate after each batch."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)})


def test_the_learning_rate_of_each_step() -> None:
    output = io.StringIO()
    callbacks = [LearningRateMonitor(), PrintCallback(["lr"], file=output)]
    with inline(Stepped, scheduler_step_freq="batch", callbacks=callbacks) as trainer:
        result = trainer.train()
        assert result["last_lr"] == pytest.approx(0.025)
        assert result["lr"] == pytest.approx((0.1 + 0.05 + 0.025) / 3)
        assert "lr" not in trainer.validate()
        assert trainer.train(num_steps=1)["lr"] == pytest.approx(0.0125), "each call begins again"
        assert trainer.history[-1]["last_lr"] == pytest.approx(0.0125)
    assert "lr=0.05833" in output.getvalue(), "other callbacks get it, too"


class SteppedInHook(Line):
    """Halves its learning rate in a hook of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*rows(12)), batch_size=4))


def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next_one() -> None:
    with inline(SteppedInHook, callbacks=[LearningRateMonitor()]) as trainer:
        result = trainer.train()
    assert result["lr"] == pytest.approx((0.1 + 0.05 + 0.025) / 3)
    assert result["last_lr"] == pytest.approx(0.025)


def norms() -> list[float]:
    """Return the gradient norms of a hand-written epoch without clipping."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    found = []
    for x, y in DataLoader(TensorDataset(*rows(12)), batch_size=4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        found.append(
            float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())
        )
        optimizer.step()
    return found


class Direct(Line):
    """Steps its optimizer itself."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()
        return {}


class OwnLoop(Line):
    """Returns its own metrics for an epoch."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        for batch in iterator:
            self.train_batch(batch, {})
        return {"mine": 1.0}


@pytest.mark.parametrize("operator", [Line, Direct, OwnLoop])
def test_the_gradient_norm_of_each_step(operator: Any) -> None:
    with inline(operator, callbacks=[GradientNormMonitor()]) as trainer:
        result, expected = trainer.train(), norms()
    assert result["grad_norm"] == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert result["last_grad_norm"] == pytest.approx(expected[-1], rel=1e-5)


def test_the_gradient_norm_is_that_before_clipping() -> None:
    with inline(options=TrainingOptions(clip_norm=1e-3), callbacks=[GradientNormMonitor()]) as trainer:
        assert trainer.train(num_steps=1)["grad_norm"] == pytest.approx(norms()[0], rel=1e-5)


def test_the_gradient_norm_is_unscaled_and_leaves_out_skipped_steps() -> None:
    options = TrainingOptions(precision="fp16")
    with inline(options=options, callbacks=[GradientNormMonitor()]) as trainer:
        results = [trainer.train() for _ in range(3)]
    assert results[0]["skipped_steps"] > 0, "the first scale is too large"
    found = [result["grad_norm"] for result in results if "grad_norm" in result]
    assert found and max(found) < 10, "finite, and not times the scale"


def test_several_optimizers_have_numbers() -> None:
    with inline(Two, callbacks=[LearningRateMonitor(), GradientNormMonitor()]) as trainer:
        result = trainer.train()
    assert (result["lr_0"], result["lr_1"]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert result["grad_norm_0"] > 0 and result["grad_norm_1"] > 0
    assert "lr" not in result


def test_throughput_of_one_worker() -> None:
    with inline(callbacks=[Throughput()]) as trainer:
        result = trainer.train()
        row = trainer.history[-1]
        assert result["samples_per_second"] == pytest.approx(12 / row["seconds"])
        assert row["samples_per_second"] == result["samples_per_second"]
        assert result["data_seconds"] > 0 and result["compute_seconds"] > 0
        assert result["data_seconds"] + result["compute_seconds"] <= row["seconds"]
        assert "communication_seconds" not in result, "there is no other worker"
        assert not {"samples_per_second", "data_seconds"} & set(trainer.validate())


def test_throughput_of_a_training_function() -> None:
    seen: list[CallResult] = []

    class Seeing(Throughput):
        def on_result(self, result: CallResult) -> None:
            seen.append(result)

    rows = [{"num_samples": 30}, {"num_samples": 10}]
    result = CallResult(kind="report", epoch=1, step=1, metrics=rows[0], by_worker=rows, world_size=2, seconds=4.0)
    assert called_by_a_trainer(Seeing()).result(result) == {"samples_per_second": 10.0}
    assert seen[0].metrics == {"num_samples": 30, "samples_per_second": 10.0}


@pytest.mark.elastic
def test_two_workers_measure_their_communication(ray_cluster: None) -> None:
    callbacks = [Throughput(), LearningRateMonitor(), GradientNormMonitor()]
    with inline(config={"rows": 48}, num_workers=2, callbacks=callbacks) as trainer:
        result = trainer.train()
        seconds = trainer.history[-1]["seconds"]
    assert result["samples_per_second"] == pytest.approx(48 / seconds)
    parts = [result[f"{name}_seconds"] for name in ("data", "compute", "communication")]
    assert min(parts) > 0 and sum(parts) <= seconds
    assert result["lr"] == pytest.approx(0.1)
    assert result["grad_norm"] > 0


@pytest.mark.parametrize("callback", [LearningRateMonitor(), GradientNormMonitor(), EMA()])
def test_what_needs_an_operator_says_what_functions_do(callback: Callback) -> None:
    callback.on_start(Run(trainer="TorchTrainer", name="f", num_workers=1))
    with pytest.raises(
        ConfigError, match=f"{type(callback).__name__} is for operators.* training function: (use|report)"
    ):
        callback.on_start(Run(trainer="TorchTrainer", name="f", num_workers=1, functions=True))

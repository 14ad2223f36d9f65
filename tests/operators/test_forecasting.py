"""The ready-made forecasting operator: it beats repeating the season, and its ratios are those of all workers' windows."""

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators.forecasting import ForecastingOperator, SeriesWindows, quantile_loss, seasonal_series
from tests.local.group import Cluster
from tests.peek import parts_of


def test_learns_the_default_series() -> None:
    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=ForecastingOperator) as trainer:
        before = trainer.validate()
        losses = [trainer.train()["train_loss"] for _ in range(3)]
        result = trainer.validate()
        predicted = trainer.predict([each[-48:] for each in seasonal_series()])
    assert losses[-1] < losses[0]
    assert before["val_mase"] > 2 * result["val_mase"] and result["val_mase"] < 0.5
    assert 0.7 < result["val_coverage"] < 0.9, "80% of the values are between the quantiles 0.1 and 0.9"
    assert result["num_samples"] == 80 and predicted.shape == (40, 12, 3)
    levels = torch.stack([each[-48:].mean() for each in seasonal_series()])
    assert (predicted[:, :, 1].mean(dim=1) - levels).abs().mean() < 0.2 * levels.mean()


class Constant(nn.Module):
    """Forecasts learned quantiles of the scaled values, whatever the past."""

    def __init__(self) -> None:
        super().__init__()
        self.quantiles = nn.Parameter(torch.tensor([-0.6, 0.1, 0.9, 1.5]))

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        return self.quantiles.expand(len(past), 4, -1)


def test_metrics_are_exact_over_all_windows() -> None:
    """Compare with the definitions, on the windows of both workers at once."""
    series = [10.0**number * each for number, each in enumerate(seasonal_series(4, 60))]
    levels = (0.2, 0.5, 0.8, 0.95)
    config = {"series": series, "history": 10, "horizon": 4, "season": 6, "held_out": 12, "batch_size": 2}
    config |= {"model": Constant, "quantiles": levels}
    with Cluster(), TorchTrainer(training_operator_cls=ForecastingOperator, config=config, num_workers=2) as trainer:
        result = trainer.validate()
    windows = SeriesWindows([each[-22:] for each in series], 10, 4, stride=4)
    assert result["num_samples"] == len(windows) == 12
    past, future = (torch.stack(each) for each in zip(*(windows[index] for index in range(12)), strict=True))
    mean, deviation = past.mean(dim=1, keepdim=True), past.std(dim=1, keepdim=True)
    found = mean.unsqueeze(2) + deviation.unsqueeze(2) * torch.tensor([-0.6, 0.1, 0.9, 1.5])
    pinball = sum(
        torch.where(future > own, level * (future - own), (1 - level) * (own - future)).sum()
        for level, own in zip(levels, found.expand(-1, 4, -1).unbind(dim=2), strict=True)
    )
    assert result["val_wql"] == pytest.approx(float(2 * pinball / future.abs().sum() / 4), rel=1e-4)
    seasonal = (past[:, 6:] - past[:, :-6]).abs().mean(dim=1)
    errors = (found[..., 1] - future).abs().mean(dim=1)
    assert result["val_mase"] == pytest.approx(float((errors / seasonal).mean()), rel=1e-4)
    inside = (found[..., 0] <= future) & (future <= found[..., 3])
    assert result["val_coverage"] == pytest.approx(float(inside.float().mean()))


def test_the_validation_forecasts_what_training_has_not_seen() -> None:
    config = {"series": [torch.arange(40.0)], "history": 8, "horizon": 4, "season": 2}
    with TorchTrainer(training_operator_cls=ForecastingOperator, config=config) as trainer:
        parts = parts_of(trainer.get_local_operator())
        trained = {float(value) for past, future in parts.train_loader.dataset for value in (*past, *future)}
        forecast = [float(value) for _, future in parts.validation_loader.dataset for value in future]
    assert trained == {float(number) for number in range(32)}
    assert forecast == [float(number) for number in range(32, 40)]


def test_a_series_that_is_shorter_than_what_is_held_out_is_not_trained_on() -> None:
    """Its first 6 values would be a window of the training, and the whole series is one of the validation."""
    config = {"series": [torch.arange(40.0), torch.arange(100.0, 109.0)], "history": 4, "horizon": 2, "season": 2}
    with TorchTrainer(training_operator_cls=ForecastingOperator, config={**config, "held_out": 12}) as trainer:
        parts = parts_of(trainer.get_local_operator())
        trained = {float(value) for past, future in parts.train_loader.dataset for value in (*past, *future)}
    assert trained == {float(number) for number in range(28)}


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must rise and have 0\.5 among them, got \(0\.1, 0\.9\)"):
        TorchTrainer(training_operator_cls=ForecastingOperator, config={"quantiles": (0.1, 0.9)})
    with pytest.raises(ValueError, match="got 12 and 12: change one of them"):
        TorchTrainer(training_operator_cls=ForecastingOperator, config={"history": 12})
    with pytest.raises(ValueError, match="no series has the 60 values of a window"):
        TorchTrainer(training_operator_cls=ForecastingOperator, config={"series": [torch.zeros(50)]})
    assert quantile_loss(
        torch.tensor([1.0, 1.0]), torch.tensor(2.0), torch.tensor([0.1, 0.9])
    ).tolist() == pytest.approx([0.1, 0.9])

"""Forecasting of time series: quantiles of the next values, for many series with one model. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.forecasting import ForecastingOperator

    config = {"series": my_series, "history": 168, "horizon": 24, "season": 24}
    with TorchTrainer(training_operator_cls=ForecastingOperator, num_workers=2, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_mase"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import Dataset

from raysgd.operators.recipe import Recipe

__all__ = ["ForecastingOperator", "SeriesWindows", "quantile_loss", "seasonal_series"]


class ForecastingOperator(Recipe):
    """Forecasts quantiles of the next `horizon` values of a series from the last `history` values. A sample is such a window.

    Training reports `train_loss` (the mean quantile loss, of scaled values). Validation forecasts the end of each series, which
    training has not seen, and reports over all windows of all workers:

    - `val_loss`; `val_wql`, the weighted quantile loss: twice the summed quantile loss, divided by the sum of absolute values
    - `val_mase`: the mean absolute scaled error of the median: each error is divided by the mean error that repeating the
      season before makes within the window's history. Below 1 is better than that
    - `val_coverage`: the share of values between the lowest and the highest quantile

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `series`: a sequence of one-dimensional tensors, or a function that creates it on the worker (default: 40 noisy series
      of two seasons and a trend)
    - `history` (48), `horizon` (12), `season` (12 steps), `held_out` at the end of each series (2 * horizon)
    - `quantiles` ((0.1, 0.5, 0.9); 0.5 must be one of them)
    - `model`: a function without arguments that returns a module from (n, history) to (n, horizon, quantiles)
      (default: two linear layers)
    - `optimizer`: called with the parameters and `lr=` (default: AdamW)
    - `lr` (0.003), `batch_size` per worker (64; a global `BATCH_SIZE` overrides it)
    """

    default_batch_size = 64
    default_lr = 3e-3

    def setup(self, config: Mapping[str, Any]) -> None:
        self.quantiles = self.to_device(torch.tensor(config.get("quantiles", (0.1, 0.5, 0.9))))
        self.median = int((self.quantiles - 0.5).abs().argmin())
        if self.quantiles[self.median] != 0.5 or (self.quantiles.diff() <= 0).any():
            raise ValueError(
                f'config["quantiles"] must rise and have 0.5 among them, got {config["quantiles"]!r}: add it, or sort them'
            )
        self.history: int = config.get("history", 48)
        self.horizon: int = config.get("horizon", 12)
        self.season: int = config.get("season", 12)
        if self.season >= self.history:
            raise ValueError(
                f'config["season"] must be less than config["history"], got {self.season} and {self.history}: change one of them'
            )
        model = self.make_model(config)
        self.model, self.optimizer = self.register(models=model, optimizers=self.make_optimizer(model, config))
        self.register_data(**self.make_loaders(config, *self.make_data(config)))

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """Make the windows for training and for validation. What a window of the validation forecasts is in no other one."""
        series = config.get("series", seasonal_series)
        series = [torch.as_tensor(each, dtype=torch.float32) for each in (series() if callable(series) else series)]
        held_out = config.get("held_out", 2 * self.horizon)
        earlier = [each[: max(len(each) - held_out, 0)] for each in series]
        later = [each[-(held_out + self.history) :] for each in series]
        return (
            SeriesWindows(earlier, self.history, self.horizon),
            SeriesWindows(later, self.history, self.horizon, stride=self.horizon),
        )

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        if "model" in config:
            model: nn.Module = config["model"]()
            return model
        shape = (self.horizon, len(self.quantiles))
        return nn.Sequential(
            nn.Linear(self.history, 128),
            nn.ReLU(),
            nn.Linear(128, shape[0] * shape[1]),
            nn.Unflatten(1, shape),
        )

    def forecast(self, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forecast the quantiles (n, horizon, quantiles) of scaled values, with the level and the scale of each window. Scaling lets
        one model forecast series of different sizes."""
        level = past.mean(dim=1, keepdim=True)
        scale = past.std(dim=1, keepdim=True).clamp(min=1e-5)
        with self.autocast():
            found = self.model((past - level) / scale)
        return found.float(), level, scale

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        past, future = batch
        found, level, scale = self.forecast(past)
        loss = quantile_loss(found, (future - level) / scale, self.quantiles).mean()
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(past)}

    @torch.no_grad()
    def validate(self, val_iterator: Iterable[Any], info: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over the data. The weighted quantile loss is a ratio of sums, not a mean of ratios, so this adds up the
        sums of all workers before it divides."""
        self.model.eval()
        sums = self.to_device(torch.zeros(6, dtype=torch.float64))
        batches = samples = 0
        for past, future in val_iterator:
            found, level, scale = self.forecast(past)
            scaled = quantile_loss(found, (future - level) / scale, self.quantiles)
            own = found * scale.unsqueeze(2) + level.unsqueeze(2)
            seasonal = (
                (past[:, self.season :] - past[:, : -self.season]).abs().mean(dim=1, keepdim=True).clamp(min=1e-5)
            )
            inside = (own[..., 0] <= future) & (future <= own[..., -1])
            terms = [
                scaled,
                quantile_loss(own, future, self.quantiles),
                future.abs(),
                (own[..., self.median] - future).abs() / seasonal,
                inside,
                torch.ones_like(future),
            ]
            sums += torch.stack([each.double().sum() for each in terms])
            batches, samples = batches + 1, samples + len(past)
        if self.world_size > 1:
            distributed.all_reduce(sums)
        loss, pinball, size, error, covered, values = sums
        return {
            "batch_count": batches,
            "num_samples": samples,
            "val_loss": loss / values / len(self.quantiles),
            "val_wql": 2 * pinball / size / len(self.quantiles),
            "val_mase": error / values,
            "val_coverage": covered / values,
        }

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> torch.Tensor:
        """Forecast the quantiles (n, horizon, quantiles) of the values after each window."""
        found, level, scale = self.forecast(batch[0] if isinstance(batch, (tuple, list)) else batch)
        return found * scale.unsqueeze(2) + level.unsqueeze(2)


def quantile_loss(found: torch.Tensor, values: torch.Tensor, quantiles: torch.Tensor) -> torch.Tensor:
    """Compute the quantile loss (pinball loss) of each quantile of each value."""
    error = values.unsqueeze(-1) - found
    return torch.maximum(quantiles * error, (quantiles - 1) * error)


class SeriesWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """All windows of some series: `history` values, and the `horizon` values after them. A window begins `stride` steps after the one
    before."""

    def __init__(self, series: Sequence[torch.Tensor], history: int, horizon: int, *, stride: int = 1) -> None:
        self.series, self.history, self.length = series, history, history + horizon
        self.places = [
            (number, start)
            for number, each in enumerate(series)
            for start in range(0, len(each) - self.length + 1, stride)
        ]
        if not self.places:
            raise ValueError(
                f"no series has the {self.length} values of a window: pass longer ones, or a smaller history, horizon or held_out"
            )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, start = self.places[index]
        window = self.series[number][start : start + self.length]
        return window[: self.history], window[self.history :]


def seasonal_series(count: int = 40, length: int = 200) -> list[torch.Tensor]:
    """Generate noisy series of different sizes: two seasons, of 12 and 30 steps, and a trend."""
    generator = torch.Generator().manual_seed(0)
    time, found = torch.arange(length), []
    for _ in range(count):
        phase, size, trend = torch.rand(3, generator=generator).tolist()
        waves = torch.sin(2 * torch.pi * (time / 12 + phase)) + torch.sin(2 * torch.pi * (time / 30 + 3 * phase))
        noise = 0.3 * torch.randn(length, generator=generator)
        found.append((1 + 9 * size) * (5 + waves + (trend - 0.5) * time / 50 + noise))
    return found

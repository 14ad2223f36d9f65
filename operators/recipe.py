"""What the recipes have in common: their data, loaders and optimizer. Worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd.constants import BATCH_SIZE
from raysgd.torch import TrainingOperator

__all__ = ["Recipe"]


class Recipe(TrainingOperator):
    """Takes its parts from the config, and has a default for each of them."""

    default_batch_size: ClassVar[int] = 32
    default_lr: ClassVar[float] = 1e-3
    default_optimizer: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """What `train_data` and `validation_data` are without the config's."""
        raise NotImplementedError

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """Make the training and the validation dataset. The second may be None."""
        train_data, validation_data = config.get("train_data"), config.get("validation_data")
        if train_data is None:
            train_data, default = self.default_data(config)
            validation_data = default if validation_data is None else validation_data
        return (
            train_data() if callable(train_data) else train_data,
            validation_data() if callable(validation_data) else validation_data,
        )

    def make_loaders(
        self,
        config: Mapping[str, Any],
        train_data: Any,
        validation_data: Any,
        *,
        whole_batches: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Make the loaders, by their names in `register_data`. `whole_batches` leaves out the training's last batch if it is smaller
        than the others."""
        options = {"batch_size": config.get(BATCH_SIZE, config.get("batch_size", self.default_batch_size)), **options}
        return {
            "train_loader": DataLoader(train_data, shuffle=True, **{"drop_last": whole_batches, **options}),
            "validation_loader": None if validation_data is None else DataLoader(validation_data, **options),
        }

    def make_optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        make = config.get("optimizer", self.default_optimizer)
        optimizer: torch.optim.Optimizer = make(model.parameters(), lr=config.get("lr", self.default_lr))
        return optimizer

"""What an operator may ask and use: its place, its settings, and helpers that make a custom loop right in any precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from raysgd.core.meters import AverageMeterCollection
from raysgd.core.ranks import RankInfo
from raysgd.core.timers import TimerCollection
from raysgd.errors import ConfigError
from raysgd.torch.gradients import Gradients
from raysgd.torch.parts import Parts, move
from raysgd.torch.precision import make_precision
from raysgd.torch.settings import ReplicaSettings

__all__ = ["OperatorBase"]


class OperatorBase:
    """Owns the registered parts, the precision and its `RankInfo`, which the replica replaces when the world changes."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        settings: ReplicaSettings | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        self._config: dict[str, Any] = {} if config is None else config
        self._settings = settings or ReplicaSettings()
        self._rank_info = rank_info or RankInfo()
        self._device = torch.device("cuda:0" if self._settings.use_gpu else "cpu")
        self._precision = make_precision(self._settings.precision, self._device)
        self._parts = Parts(options=self._settings.options, exchange=self._settings.exchange())
        self._gradients = Gradients(self._settings.options, self._precision, self._parts)
        self._meter = AverageMeterCollection()
        self._complete: set[str] = set()
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(self._config)

    def setup(self, config: dict[str, Any]) -> None:
        """Make the parts and register them with `self.register` and `self.register_data`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no setup(self, config): make model, optimizer and data there, and call "
            "self.register(...) and self.register_data(...)"
        )

    # -- helpers for custom loops ---------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Wrap forward pass and loss in it; right in every precision."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        """The backward pass, with the loss scaled where precision or accumulation need it. (`loss_id` is for Apex, with
        num_losses in its arguments.)"""
        self._gradients.backward(loss, optimizer, loss_id)

    def step(self, optimizer: Any = None) -> None:
        """The optimizer's step (of the only one, when none is given), with clipping; in the middle of batches that
        are accumulated, nothing."""
        self._gradients.step(self._only_optimizer() if optimizer is None else optimizer)

    def zero_grad(self, optimizer: Any = None) -> None:
        """Clears the gradients of one optimizer, or of all; in the middle of batches that are accumulated, nothing."""
        self._gradients.zero_grad(self._parts.optimizers if optimizer is None else [optimizer])

    def to_device(self, batch: Any) -> Any:
        """A batch you made yourself, on this worker's device."""
        return move(batch, self.device)

    def _only_optimizer(self) -> Any:
        if len(self._parts.optimizers) != 1:
            raise ConfigError(
                f"{len(self._parts.optimizers)} optimizers are registered: say which one, step(optimizer)"
            )
        return self._parts.optimizers[0]

    # -- what an operator may ask ---------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where models and batches are."""
        return self._device

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def world_size(self) -> int:
        """How many workers there are now; changes when machines come and go."""
        return self._rank_info.world_size

    @property
    def world_rank(self) -> int:
        return self._rank_info.world_rank

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine."""
        return self._rank_info.local_rank

    @property
    def _is_distributed(self) -> bool:
        return self._settings.distributed

    @property
    def device_ids(self) -> list[int] | None:
        return [self.device.index or 0] if self.device.type == "cuda" else None

    @property
    def use_gpu(self) -> bool:
        return self._settings.use_gpu

    @property
    def use_tqdm(self) -> bool:
        return self._settings.use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        return self._settings.scheduler_step_freq

    @property
    def use_fp16(self) -> Any:
        return self._settings.use_fp16

    @property
    def use_fp16_native(self) -> bool:
        return self._precision.key == "amp_native"

    @property
    def use_fp16_apex(self) -> bool:
        return self._precision.key == "amp_apex"

    @property
    def _amp(self) -> Any:
        """v1 operators say `self._amp.autocast()`: Apex's amp module, or what has native autocast."""
        native = self._precision if self._precision.key == "amp_native" else None
        return getattr(self._precision, "amp", native)

    @property
    def _amp_scaler(self) -> Any:
        return getattr(self._precision, "scaler", None)

    # -- v1's names for the parts ---------------------------------------------------------------------

    def _given(self, name: str) -> Any:
        value = getattr(self._parts, name)
        if value is None or (isinstance(value, list) and not value):
            call = "register_data" if "loader" in name else "register"
            raise RuntimeError(f"no {name.replace('_', ' ')} here: did {type(self).__name__}.setup call self.{call}?")
        return value

    def _get_models(self) -> Any:
        return self._given("wrapped")

    def _get_optimizers(self) -> Any:
        return self._given("optimizers")

    def _get_schedulers(self) -> Any:
        return self._given("schedulers")

    def _get_criterion(self) -> Any:
        return self._given("criterion")

    def _get_train_loader(self) -> Any:
        return self._given("train_loader")

    def _get_validation_loader(self) -> Any:
        return self._given("validation_loader")

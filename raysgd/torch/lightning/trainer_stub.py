"""What a LightningModule has as `self.trainer`: a substitute for Lightning's Trainer. Worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.lightning.module import INSTEAD


class TrainerStub:
    """Has the counters of training, and what LightningModule's methods read. Any other attribute
    raises an error that names it.

    It owns no state of training: the operator updates its counters.
    """

    training = validating = False
    testing = predicting = sanity_checking = barebones = False
    logger = progress_bar_callback = None
    _results = None  # Lightning's self.log reads it first, and raises its own error outside of a call

    def __init__(self, rank_info: RankInfo, total_steps: Callable[..., int]) -> None:
        self.total_steps = total_steps
        self.join(rank_info)
        self.current_epoch = self.global_step = 0
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}

    def join(self, rank_info: RankInfo) -> None:
        self.global_rank, self.world_size = rank_info.world_rank, rank_info.world_size
        self.local_rank, self.node_rank = rank_info.local_rank, rank_info.node_rank
        self.is_global_zero = self.global_rank == 0

    @property
    def should_stop(self) -> bool:
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        raise ConfigError(
            "self.trainer.should_stop is not supported, because the script decides how many epochs it trains: stop calling "
            f"trainer.train(), or {INSTEAD}"
        )

    def __getattr__(self, name: str) -> Any:
        known = sorted(each for each in {*vars(self), *dir(type(self))} if not each.startswith("_"))
        raise AttributeError(
            f"self.trainer.{name} does not exist, because raysgd trains this module: pass what you need in the config, or {INSTEAD}. "
            f"Available are {', '.join(known)}"
        )

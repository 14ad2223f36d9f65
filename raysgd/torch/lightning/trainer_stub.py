"""What a LightningModule has as `self.trainer`: a substitute for Lightning's Trainer. Worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.options import TrainingOptions
from raysgd.torch.precision import Precision


class StepServices:
    """Runs the backward pass and the optimizer's step, with the module's hooks around them.

    Lightning's `optimizers`, `clip_gradients` and `all_gather` call it as the trainer's `strategy`,
    so its methods have the names of Lightning's Strategy.
    """

    def __init__(self, module: Any, precision: Precision, optimizers: list[Any], core: Any) -> None:
        self.lightning_module, self._precision = module, precision
        self._lightning_optimizers = [core.LightningOptimizer(each) for each in optimizers]
        for wrapped in self._lightning_optimizers:
            wrapped._strategy = self

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        module, scaler = self.lightning_module, getattr(self._precision, "scaler", None)
        module.on_before_backward(loss)
        module.backward(loss if scaler is None else scaler.scale(loss), *args, **kwargs)
        module.on_after_backward()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step the optimizer; its closure may compute the gradients. Hooks get them unscaled."""
        module = self.lightning_module

        def closed() -> Any:
            result = closure()
            if result is not None:
                self._precision.unscale(optimizer)
            module.on_before_optimizer_step(optimizer)
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=module.trainer.gradient_clip_val,
                gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
            )
            return result

        if getattr(self._precision, "scaler", None) is None:
            return optimizer.step(closure=closed, **kwargs)
        result = closed()
        if result is not None:
            self._precision.step(optimizer)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val <= 0:
            return
        parameters = self._precision.parameters(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, clip_val)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if not dist.is_initialized():
            return tensor
        if sync_grads:
            raise ConfigError("self.all_gather(sync_grads=True) is not supported: pass sync_grads=False")
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered) if len(gathered) > 1 else tensor


class TrainerStub:
    """Has the counters of training, and what LightningModule's methods read. Any other attribute
    raises an error that names it.

    It owns no state of training: the operator updates its counters.
    """

    training = validating = False
    testing = predicting = sanity_checking = barebones = False
    accumulate_grad_batches = 1
    logger = progress_bar_callback = datamodule = None
    _results = None  # Lightning's self.log reads it first, and raises its own error outside of a call

    def __init__(
        self, module: Any, rank_info: RankInfo, options: TrainingOptions, total_steps: Callable[..., int]
    ) -> None:
        self.lightning_module = self.model = module
        self.total_steps = total_steps
        clip_by_norm = options.clip_norm is not None
        self.gradient_clip_val = options.clip_norm if clip_by_norm else options.clip_value
        self.gradient_clip_algorithm = None if self.gradient_clip_val is None else "norm" if clip_by_norm else "value"
        self.join(rank_info)
        self.current_epoch = self.global_step = 0
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}

    def attach(self, services: StepServices, optimizers: list[Any], schedules: list[Any]) -> None:
        self.strategy = self.precision_plugin = services
        self.optimizers, self.lr_scheduler_configs = optimizers, schedules

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
            "self.trainer.should_stop is not supported: raysgd trains one epoch for each trainer.train(). Log the value that "
            "decides, and let the script stop calling trainer.train()"
        )

    def __getattr__(self, name: str) -> Any:
        known = sorted(each for each in {*vars(self), *dir(type(self))} if not each.startswith("_"))
        raise AttributeError(
            f"self.trainer.{name} does not exist: raysgd trains this module, without Lightning's Trainer, and the script decides "
            f"how many epochs it trains. Pass what you need in the config. Available are {', '.join(known)}"
        )

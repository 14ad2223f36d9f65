"""Ray's strategies and environment for Lightning's Trainer. Worker."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch

from raysgd.errors import ConfigError
from raysgd.train.lightning.continuation import Continuation
from raysgd.train.lightning.package import imported
from raysgd.train.session_functions import get_context
from raysgd.train.sessions import current
from raysgd.train.torch import get_device

strategies: Any = imported(".strategies")


class RayLightningEnvironment(imported(".plugins.environments").LightningEnvironment):  # type: ignore[misc]
    """Tells Lightning raysgd's ranks, whose workers and process group exist already."""

    creates_processes_externally = True

    def world_size(self) -> int:
        return get_context().get_world_size()

    def global_rank(self) -> int:
        return get_context().get_world_rank()

    def local_rank(self) -> int:
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        return get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Only raysgd changes it."""

    def set_global_rank(self, rank: int) -> None:
        """Only raysgd changes it."""

    def teardown(self) -> None:
        """The environment's variables are raysgd's."""


class _OnWorkers:
    """The parts that the three strategies have in common. SIGTERM stays a preemption notice to
    raysgd: Lightning's handler would make a collective call, for which no other rank is ready."""

    world_size: int
    global_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_notice = signal.getsignal(signal.SIGTERM)

    @property
    def root_device(self) -> torch.device:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def on_train_start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_notice)

    on_validation_start = on_test_start = on_predict_start = on_train_start


class RayDDPStrategy(_OnWorkers, strategies.DDPStrategy):  # type: ignore[misc]
    """DDP among raysgd's workers. After `prepare_trainer`, the training continues with the next
    batch when workers fail or join, and each step keeps its samples. The arguments are those of
    `DDPStrategy`."""

    continuation: Continuation | None = None
    model: Any

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.continuation is not None and trainer.training:
            self.continuation.check()

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.continuation is None or not self.continuation.trainer.training:
            return dataloader
        return self.continuation.divided(dataloader)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._trained = self._which_train()

    def _which_train(self) -> list[bool]:
        return [each.requires_grad for each in self.lightning_module.parameters()]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._which_train() != self._trained:  # DDP averages the gradients of those that it found when it was made
            self.model = self.model.module
            self.configure_ddp()
        if self.continuation is not None:
            self.continuation.begin_batch()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = 1.0 if self.continuation is None else self.continuation.weight
        result: torch.Tensor = super().backward(closure_loss * weight, *args, **kwargs)
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
        if self.continuation is not None and self.continuation.committing:
            self.continuation.checkpoint = checkpoint
            return
        if self.continuation is not None:
            self.continuation.saved.append(str(filepath))
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = None if self.continuation is None else self.continuation.resumed(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs) if checkpoint is None else checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self.continuation is None or not self.continuation.begin():
            super().load_optimizer_state_dict(checkpoint)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.continuation is None or not self.continuation.committing:
            super().barrier(*args, **kwargs)


class RayFSDPStrategy(_OnWorkers, strategies.FSDPStrategy):  # type: ignore[misc]
    """FSDP among raysgd's workers, with the arguments of `FSDPStrategy`. It does not continue in
    place, because no rank has all weights: a failure starts the function again."""


class RayDeepSpeedStrategy(_OnWorkers, strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """DeepSpeed among raysgd's workers, with the arguments of `DeepSpeedStrategy`. It does not
    continue in place, because no rank has all states: a failure starts the function again."""


STRATEGIES = (RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy)


def prepare_trainer(trainer: Any, *, elastic: bool = True, commit_every: int = 1) -> Any:
    """Prepare the `trainer` for raysgd's workers.

    With `elastic` and a `RayDDPStrategy`, `fit` continues with the next batch when workers fail or
    join. Otherwise the function runs again, and continues from what it loads itself. The states are
    copied in memory before a batch, for each so many batches (`commit_every`); those since then are
    computed again.
    """
    strategy = trainer.strategy
    names = ", ".join(each.__name__ for each in STRATEGIES)
    if not isinstance(strategy, STRATEGIES):
        raise ConfigError(
            f"prepare_trainer needs a Trainer with strategy= one of {names}, got {type(strategy).__name__}"
        )
    if not isinstance(strategy.cluster_environment, RayLightningEnvironment):
        plugin = type(strategy.cluster_environment).__name__
        raise ConfigError(f"prepare_trainer needs a Trainer with plugins=[RayLightningEnvironment()], got {plugin}")
    if elastic and isinstance(strategy, RayDDPStrategy):
        strategy.continuation = Continuation(trainer, current("lightning.prepare_trainer"), commit_every)
    return trainer

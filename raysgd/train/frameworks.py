"""`DataParallelTrainer` with a backend: PyTorch, TensorFlow, Horovod. Not to be mixed up with `raysgd.TorchTrainer`, which
trains a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.errors import ConfigError
from raysgd.train.backends import BackendConfig, HorovodConfig, TensorflowConfig, TorchConfig
from raysgd.train.fit.trainer import DataParallelTrainer

__all__ = ["HorovodTrainer", "TensorflowTrainer", "TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """A training function with a process group of torch.distributed.

        trainer = raysgd.train.TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2))
        trainer.fit().metrics

    `torch_config` (or `torch_backend`, its older name) is a TorchConfig; the other arguments are DataParallelTrainer's.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        torch_config: TorchConfig | None = None,
        torch_backend: TorchConfig | None = None,
        **settings: Any,
    ) -> None:
        backend = _chosen(TorchConfig, torch_config=torch_config, torch_backend=torch_backend)
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


class TensorflowTrainer(DataParallelTrainer):
    """A training function with TF_CONFIG set, for a strategy of tf.distribute that it makes itself.

    `tensorflow_config` (or `tensorflow_backend`) is a TensorflowConfig; the other arguments are DataParallelTrainer's.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tensorflow_config: TensorflowConfig | None = None,
        tensorflow_backend: TensorflowConfig | None = None,
        **settings: Any,
    ) -> None:
        backend = _chosen(TensorflowConfig, tensorflow_config=tensorflow_config, tensorflow_backend=tensorflow_backend)
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


class HorovodTrainer(DataParallelTrainer):
    """A training function with Horovod initialised.

    `horovod_config` (or `horovod_backend`) is a HorovodConfig; the other arguments are DataParallelTrainer's.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        horovod_config: HorovodConfig | None = None,
        horovod_backend: HorovodConfig | None = None,
        tensorflow_backend: HorovodConfig | None = None,  # a guide of Ray's calls it so
        **settings: Any,
    ) -> None:
        backend = _chosen(
            HorovodConfig,
            horovod_config=horovod_config,
            horovod_backend=horovod_backend,
            tensorflow_backend=tensorflow_backend,
        )
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


def _chosen(kind: type[BackendConfig], **named: Any) -> BackendConfig:
    """The one that was given, under whichever of its names."""
    given = {name: config for name, config in named.items() if config is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are names of one argument: pass one of them")
    for name, config in given.items():
        if not isinstance(config, kind):
            raise ConfigError(f"{name} must be a raysgd.train.{kind.__name__}, got {config!r}")
    return next(iter(given.values()), kind())

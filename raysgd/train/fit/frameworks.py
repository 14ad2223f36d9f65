"""`DataParallelTrainer` for each framework. `raysgd.TorchTrainer` is another class. Driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.errors import ConfigError
from raysgd.train.backends import BackendConfig, HorovodConfig, TensorflowConfig, TorchConfig
from raysgd.train.fit.trainer import DataParallelTrainer


class TorchTrainer(DataParallelTrainer):
    """Runs `train_loop_per_worker` with a process group of torch.distributed.

        trainer = raysgd.train.TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2))
        trainer.fit().metrics

    `torch_config` (older name: `torch_backend`) is a TorchConfig. The other arguments are those of
    DataParallelTrainer.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        torch_config: TorchConfig | None = None,
        torch_backend: TorchConfig | None = None,
        **settings: Any,
    ) -> None:
        backend = _select(TorchConfig, torch_config=torch_config, torch_backend=torch_backend)
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


class TensorflowTrainer(DataParallelTrainer):
    """Runs `train_loop_per_worker` with TF_CONFIG set, for the tf.distribute strategy that the
    function creates.

    `tensorflow_config` (older name: `tensorflow_backend`) is a TensorflowConfig. The other
    arguments are those of DataParallelTrainer.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tensorflow_config: TensorflowConfig | None = None,
        tensorflow_backend: TensorflowConfig | None = None,
        **settings: Any,
    ) -> None:
        backend = _select(TensorflowConfig, tensorflow_config=tensorflow_config, tensorflow_backend=tensorflow_backend)
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


class HorovodTrainer(DataParallelTrainer):
    """Runs `train_loop_per_worker` with the environment for `hvd.init()`.

    `horovod_config` (older names: `horovod_backend`, `tensorflow_backend`) is a HorovodConfig. The
    other arguments are those of DataParallelTrainer.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        horovod_config: HorovodConfig | None = None,
        horovod_backend: HorovodConfig | None = None,
        tensorflow_backend: HorovodConfig | None = None,  # the name in one of Ray's guides
        **settings: Any,
    ) -> None:
        backend = _select(
            HorovodConfig,
            horovod_config=horovod_config,
            horovod_backend=horovod_backend,
            tensorflow_backend=tensorflow_backend,
        )
        super().__init__(train_loop_per_worker, backend_config=backend, **settings)


def _select(kind: type[BackendConfig], **named: Any) -> BackendConfig:
    """Choose the config that was passed under one of its names, or the default."""
    configs = {name: config for name, config in named.items() if config is not None}
    if len(configs) > 1:
        raise ConfigError(f"{' and '.join(configs)} are names of one argument: pass only one of them")
    for name, config in configs.items():
        if not isinstance(config, kind):
            raise ConfigError(f"{name} must be a raysgd.train.{kind.__name__}, got {config!r}")
    return next(iter(configs.values()), kind())

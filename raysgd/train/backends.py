"""The backends of function trainers: what is set up on the workers before a training function runs.
Driver.

A `BackendConfig` holds the settings. Its `backend_cls` has hooks, which run on the driver and get
the worker group. The engine connects the ranks of a generation, with the object that `make_backend`
creates.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from raysgd.config import above_0, one_of
from raysgd.core.protocols import SingleWorkerBackend
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.group.devices import OffersGpus, see_gpus, shared_gpus

__path__: list[str] = []  # lets Python look for `raysgd.train.backends.torch`, which raysgd.compat provides


class Backend:
    """Override the hooks that you need. They run on the driver, and get the worker group and the
    config. With `share_cuda_visible_devices`, each worker sees the GPUs of all workers on its node.

        class Greeting(Backend):
            def on_start(self, worker_group, backend_config):
                worker_group.execute(set_variable, "GREETING", backend_config.text)
    """

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Called when the workers of a generation, the `worker_group`, are ready: at the start, and
        after each change of workers. `backend_config` is the trainer's."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Called right before a training function runs, or runs again, on all workers of
        `worker_group`. `backend_config` is the trainer's."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Called before the workers of `worker_group` end, with the trainer's `backend_config`."""

    def handle_failure(self, worker_group: Any, failed_worker_indexes: Sequence[int], backend_config: Any) -> None:
        """Called instead of `on_start` after worker failures, with the same `worker_group` and
        `backend_config`. The workers in `failed_worker_indexes` were removed or replaced."""
        self.on_start(worker_group, backend_config)

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        """Convert the reported or saved `data` on the worker, before it is sent."""
        return data

    @staticmethod
    def decode_data(data: dict[str, Any]) -> dict[str, Any]:
        """Convert the reported `data` on the driver, after it is received."""
        return data


class SharedGpus(OffersGpus, SingleWorkerBackend):
    """Connects no ranks, but lets each worker see the GPUs of all workers on its node, by rank."""

    needs_offers = True

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        return [{"gpus": gpus} for gpus in shared_gpus(rank_infos, offers)] if rank_infos else []

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        if "gpus" in settings:
            see_gpus(settings["gpus"], self.offer()["gpus"])


class BackendConfig:
    """The settings of a backend. Subclass it, usually as a dataclass, and return the backend from
    `backend_cls`, a property or a method."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend

    def check(self) -> None:
        """Called when a trainer is created. Raise an error if something is not installed."""

    def make_backend(self, *, host: str, gpus: float, join_s: float, collective_s: float) -> Any:
        """Make what connects the ranks of a generation: here, nothing does."""
        return SharedGpus() if gpus and backend_of(self).share_cuda_visible_devices else SingleWorkerBackend()

    @property
    def collective_timeout_s(self) -> float:
        return 1800.0


class TorchHooks(Backend):
    """The process group is up when `on_start` is called."""

    share_cuda_visible_devices = True

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Destroy the process group; the workers keep running."""
        worker_group.execute(_leave_process_group)

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        from raysgd.torch.group.function_backend import to_cpu

        moved: dict[str, Any] = to_cpu(data)
        return moved


@dataclass
class TorchConfig(BackendConfig):
    """torch.distributed.

    backend      "gloo" or "nccl"; None: nccl with GPUs, gloo without
    init_method  "env": also set MASTER_ADDR, RANK and so on, for code that reads them; "tcp": do
                 not set them
    timeout_s    the limit for one collective
    """

    backend: str | None = None
    init_method: Literal["env", "tcp"] = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        one_of("init_method", self.init_method, "env", "tcp")
        one_of("TorchConfig's backend", self.backend, "gloo", "nccl", None)

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchHooks

    @property
    def collective_timeout_s(self) -> float:
        return float(self.timeout_s)

    def check(self) -> None:
        _require("torch")

    def make_backend(self, *, host: str, gpus: float, join_s: float, collective_s: float) -> Any:
        from raysgd.torch.group.function_backend import TorchFunctionBackend
        from raysgd.torch.group.process_group import name_for

        name, env = name_for(self.backend, gpus), self.init_method == "env"
        return TorchFunctionBackend(
            name, env=env, use_gpu=gpus > 0, host=host, join_s=join_s, collective_s=collective_s
        )


@dataclass
class TensorflowConfig(BackendConfig):
    """TF_CONFIG for a tf.distribute strategy, which the function creates."""

    def check(self) -> None:
        _require("tensorflow")

    def make_backend(self, *, host: str, gpus: float, join_s: float, collective_s: float) -> Any:
        from raysgd.tf.function_backend import TensorflowFunctionBackend

        return TensorflowFunctionBackend(host=host)


class HorovodHooks(Backend):
    """The environment is set for `hvd.init()`, which the function calls."""

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        return TorchHooks.encode_data(data) if "torch" in sys.modules else data


@dataclass
class HorovodConfig(BackendConfig):
    """Horovod over gloo, for functions that call `hvd.init()`, like scripts for Horovod's own Ray
    executor.

    nics       the network interface that all workers have (the first one is used); None: the one
               towards the driver
    timeout_s  the limit for all ranks to reach `hvd.init()`, and for a host that stops responding

    `verbose`, `key`, `ssh_port`, `ssh_identity_file`, `ssh_str` and `placement_group_timeout_s`
    exist for compatibility and have no effect: Ray starts the workers, not ssh.
    """

    nics: set[str] | None = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100

    def __post_init__(self) -> None:
        if self.nics is not None and (isinstance(self.nics, str) or not all(isinstance(nic, str) for nic in self.nics)):
            raise ConfigError(f"nics must be a set of names of network interfaces, got {self.nics!r}")
        above_0("timeout_s", self.timeout_s)

    @property
    def backend_cls(self) -> type[Backend]:
        return HorovodHooks

    def check(self) -> None:
        from raysgd.horovod.arguments import check_installed

        check_installed()

    def make_backend(self, *, host: str, gpus: float, join_s: float, collective_s: float) -> Any:
        from raysgd.horovod.backend import HorovodFunctionBackend

        interface = next(iter(self.nics), None) if self.nics else None
        wait_s = min(float(self.timeout_s), collective_s)
        return HorovodFunctionBackend(host=host, wait_s=wait_s, interface=interface, use_gpu=gpus > 0)


CONFIGS: dict[str, type[BackendConfig]] = {
    "torch": TorchConfig,
    "tensorflow": TensorflowConfig,
    "horovod": HorovodConfig,
    "none": BackendConfig,
}


def parse_backend(backend: Any) -> BackendConfig:
    """Find the config for a name or a config. Raise an error if it is not installed."""
    if backend is None:
        backend = "none"
    if isinstance(backend, str):
        backend = get_backend_config_cls(backend)()
    if not isinstance(backend, BackendConfig):
        names = ", ".join(map(repr, CONFIGS))
        raise TypeError(f"backend must be a name ({names}) or a BackendConfig, got {backend!r}")
    backend.check()
    return backend


def get_backend_config_cls(backend_name: str) -> type[BackendConfig]:
    """Find the class of the configs of a backend, by its name: one of raysgd's, or an entry point
    of the group `raysgd.backends` in an installed package."""
    if backend_name in CONFIGS:
        return CONFIGS[backend_name]
    others = {each.name: each for each in entry_points(group="raysgd.backends")}
    if backend_name not in others:
        names = ", ".join(map(repr, [*CONFIGS, *others]))
        raise ConfigError(f"backend must be one of {names} or a BackendConfig, got {backend_name!r}")
    config: type[BackendConfig] = others[backend_name].load()
    return config


def backend_of(config: BackendConfig) -> Backend:
    """The hooks of a config, whose `backend_cls` may be a property or a method."""
    value: Any = config.backend_cls
    kind = value if isinstance(value, type) else value()
    if not isinstance(kind, type) or not issubclass(kind, Backend):
        raise ConfigError(
            f"{type(config).__name__}.backend_cls must return a subclass of raysgd.train.Backend, got {kind!r}"
        )
    return kind()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"this backend needs {package}, which is not installed: pip install 'raysgd[{package}]'")


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

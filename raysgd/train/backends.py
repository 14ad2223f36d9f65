"""Backends of function trainers: what is set up on the workers before a training function runs.

A `BackendConfig` says what is wanted; its `backend_cls` has hooks that are called on the driver, with the group of
workers at hand. How the ranks of a generation meet is the engine's business: `make_backend` makes the object for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.core.ranks import SingleWorkerBackend
from raysgd.errors import ConfigError

__all__ = [
    "Backend",
    "BackendConfig",
    "HorovodConfig",
    "TensorflowConfig",
    "TorchConfig",
    "backend_of",
    "parse_backend",
]


class Backend:
    """Override what you need. Driver: each hook gets the group of workers and the config.

    class Greeting(Backend):
        def on_start(self, worker_group, backend_config):
            worker_group.execute(set_variable, "GREETING", backend_config.text)
    """

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Whenever a new set of workers stands: at the start, and after each change of members."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Right before a training function runs (again) on all workers."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Before the workers end."""

    def handle_failure(self, worker_group: Any, failed_worker_indexes: Sequence[int], backend_config: Any) -> None:
        """After a loss, when the next set of workers stands. The lost ones are gone and replaced by the engine."""
        self.on_start(worker_group, backend_config)

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        """Worker: what was reported or saved, before it travels."""
        return data

    @staticmethod
    def decode_data(data: dict[str, Any]) -> dict[str, Any]:
        """Driver: what was reported, when it has come."""
        return data


class BackendConfig:
    """What a backend is told. Subclass it, usually as a dataclass, and name the backend in `backend_cls` (a property
    or a plain method)."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend

    def check(self) -> None:
        """Driver, when a trainer is made: is all there that is needed?"""

    def make_backend(self, *, host: str, use_gpu: bool, join_s: float, collective_s: float) -> Any:
        """Driver: how the ranks of a generation meet. This one has them meet nowhere."""
        return SingleWorkerBackend()

    @property
    def collective_timeout_s(self) -> float:
        return 1800.0


class TorchHooks(Backend):
    """The ranks have met in a process group when `on_start` is called."""

    share_cuda_visible_devices = True

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ends the process group; the workers go on."""
        worker_group.execute(_leave_process_group)

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        from raysgd.train.torch_function import to_cpu

        moved: dict[str, Any] = to_cpu(data)
        return moved


@dataclass
class TorchConfig(BackendConfig):
    """torch.distributed.

    backend      "gloo" or "nccl"; None: nccl with GPUs, gloo without
    init_method  "env": MASTER_ADDR, RANK and the others are set too, for code that reads them; "tcp": they are not
    timeout_s    for one collective
    """

    backend: str | None = None
    init_method: Literal["env", "tcp"] = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.init_method not in ("env", "tcp"):
            raise ConfigError(f"init_method must be 'env' or 'tcp', got {self.init_method!r}")
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigError(f"TorchConfig's backend must be 'gloo', 'nccl' or None, got {self.backend!r}")

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchHooks

    @property
    def collective_timeout_s(self) -> float:
        return float(self.timeout_s)

    def check(self) -> None:
        _need("torch", "torch")

    def make_backend(self, *, host: str, use_gpu: bool, join_s: float, collective_s: float) -> Any:
        from raysgd.train.torch_function import TorchMeeting

        name = self.backend or ("nccl" if use_gpu else "gloo")
        env = self.init_method == "env"
        return TorchMeeting(name, env=env, use_gpu=use_gpu, host=host, join_s=join_s, collective_s=collective_s)


@dataclass
class TensorflowConfig(BackendConfig):
    """TF_CONFIG for the strategies of tf.distribute, which the function makes itself."""

    def check(self) -> None:
        _need("tensorflow", "tensorflow")

    def make_backend(self, *, host: str, use_gpu: bool, join_s: float, collective_s: float) -> Any:
        from raysgd.train.tensorflow_function import TensorflowFunctionBackend

        return TensorflowFunctionBackend(host=host)


class HorovodHooks(Backend):
    """The function says `hvd.init()` itself; who is where is in its environment by then."""

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        return TorchHooks.encode_data(data) if "torch" in sys.modules else data


@dataclass
class HorovodConfig(BackendConfig):
    """Horovod over gloo, for functions that call `hvd.init()`, as scripts for Horovod's own Ray executor do.

    nics       the network interface that the workers share (the first one named is used); None: the one that leads to
               the driver
    timeout_s  for the ranks to come to `hvd.init()`, and for a host that falls silent

    The others are there for older code, and mean nothing here: Ray starts the workers, not ssh.
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
        if not isinstance(self.timeout_s, (int, float)) or isinstance(self.timeout_s, bool) or self.timeout_s <= 0:
            raise ConfigError(f"timeout_s must be a number of seconds above 0, got {self.timeout_s!r}")

    @property
    def backend_cls(self) -> type[Backend]:
        return HorovodHooks

    def check(self) -> None:
        from raysgd.horovod.arguments import check_installed

        check_installed()

    def make_backend(self, *, host: str, use_gpu: bool, join_s: float, collective_s: float) -> Any:
        from raysgd.horovod.function import HorovodMeeting

        interface = next(iter(self.nics), None) if self.nics else None
        wait_s = min(float(self.timeout_s), collective_s)
        return HorovodMeeting(host=host, wait_s=wait_s, interface=interface, use_gpu=use_gpu)


CONFIGS: dict[str, type[BackendConfig]] = {
    "torch": TorchConfig,
    "tensorflow": TensorflowConfig,
    "horovod": HorovodConfig,
    "none": BackendConfig,
}


def parse_backend(backend: Any) -> BackendConfig:
    """A name or a config, as trainers take it; what is missing for it is said now."""
    if backend is None:
        backend = "none"
    if isinstance(backend, str):
        if backend not in CONFIGS:
            raise ConfigError(
                f"backend must be one of {', '.join(map(repr, CONFIGS))} or a BackendConfig, got {backend!r}"
            )
        backend = CONFIGS[backend]()
    if not isinstance(backend, BackendConfig):
        raise TypeError(f"backend must be a name ({', '.join(map(repr, CONFIGS))}) or a BackendConfig, got {backend!r}")
    backend.check()
    return backend


def backend_of(config: BackendConfig) -> Backend:
    """The hooks: `backend_cls` may be a property, as here, or a plain method."""
    named: Any = config.backend_cls
    kind = named if isinstance(named, type) else named()
    if not isinstance(kind, type) or not issubclass(kind, Backend):
        raise ConfigError(
            f"{type(config).__name__}.backend_cls must name a subclass of raysgd.train.Backend, got {kind!r}"
        )
    return kind()


def _need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"this backend needs {package}, which is not installed: pip install 'raysgd[{extra}]'")


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

"""The backends that connect ranks with Horovod: one for operators, and one for training functions.
Both.

Training functions may use Horovod without torch, so this module does not import torch.
"""

from __future__ import annotations

import functools
import inspect
import re
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.core.protocols import ProcessGroupBackend
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, causes_of
from raysgd.horovod import foreign
from raysgd.horovod.rendezvous import HorovodRendezvous, end_rendezvous, set_environment
from raysgd.torch.group.devices import OffersGpus, see_gpus, shared_gpus
from raysgd.torch.group.sockets import Connections

# Horovod's threads communicate all the time, also while the training thread computes. So a host that sends nothing for
# this long has failed.
SILENCE_S = 30.0
GRACE_S = 1.0
FRAMEWORKS = ("horovod.torch", "horovod.tensorflow", "horovod.mxnet")

# Horovod raises the same type for everything that goes wrong between ranks. These texts mean mistakes in the program.
MISTAKES = re.compile(r"^(Mismatched|Duplicate|Requested|Process-set rank zero)|not supported|received invalid")
INIT_FAILED = "Horovod initialization failed"

_shutdown_lock = threading.Lock()  # if two threads join Horovod's own thread, the behaviour is undefined


class Ranks(ProcessGroupBackend):
    """The part that both backends share. On the driver: owns the rendezvous. On a worker: owns the
    environment of this generation, and knows the sockets that `hvd.init()` opens.

    `wait_s` limits how long Horovod waits for the other ranks in `hvd.init()`, and for a host that
    stops responding. `ensure_whole` has nothing to do, as Horovod's calls return when they are
    done, or raise an error.
    """

    def __init__(self, *, host: str, wait_s: float, interface: str | None = None) -> None:
        self._wait_s, self._interface = wait_s, interface
        self._rendezvous = HorovodRendezvous(host, wait_s=wait_s)
        self._environment: dict[str, str] = {}
        self._connections = Connections()

    def _enter(self, environment: dict[str, str]) -> None:
        """Prepare this process for `hvd.init()`; without an environment, it is the only rank."""
        self._environment = environment
        set_environment(environment, interface=self._interface)
        watch_init(self._connections)

    def leave(self) -> None:
        shut_down(self._connections.shut, limit_s=self._wait_s + 10)
        self._connections.forget()

    def abort(self) -> None:
        """Close Horovod's connections: its thread fails, and so do calls that wait for it. End
        `hvd.init()` on ranks that wait in it."""
        self._connections.shut()
        if self._environment:
            threading.Thread(target=end_rendezvous, args=(self._environment,), daemon=True).start()

    def collectives(self) -> int:
        return -1  # Horovod does not count its calls

    def is_interruption(self, error: BaseException) -> bool:
        return is_interruption(error)


class HorovodBackend(Ranks):
    """Connects the ranks of operators twice: in a torch process group, for what raysgd itself needs
    from all ranks (an order of samples, a TorchMetrics value), and in Horovod, for gradients. The
    process group comes first, so that all ranks are alive when they call `hvd.init()`."""

    shares = True

    def __init__(self, *, host: str = "127.0.0.1", join_s: float = 60.0, collective_s: float = 540.0) -> None:
        from raysgd.torch.group.process_group import TorchBackend

        super().__init__(host=host, wait_s=min(SILENCE_S, collective_s))
        self._process_group = TorchBackend("gloo", host=host, join_s=join_s, collective_s=collective_s)

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        pairs = zip(self._process_group.plan(rank_infos), self._rendezvous.open(rank_infos), strict=True)
        return [{"process_group": settings, "environment": environment} for settings, environment in pairs]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._process_group.join(rank_info, settings.get("process_group", {}))
        self._enter(settings.get("environment", {}))
        import horovod.torch as hvd

        try:
            hvd.init()
        except ValueError:
            hvd.shutdown()  # ends its thread, so that the next generation can start one
            raise

    def leave(self) -> None:
        super().leave()
        self._process_group.leave()

    def abort(self) -> None:
        super().abort()
        self._process_group.abort()

    def is_interruption(self, error: BaseException) -> bool:
        return super().is_interruption(error) or self._process_group.is_interruption(error)


class HorovodFunctionBackend(OffersGpus, Ranks):
    """Connects the ranks of a training function, which calls `hvd.init()` itself. Each worker sees
    the GPUs of all workers on its node, because scripts call `set_device(hvd.local_rank())`."""

    def __init__(self, *, host: str, wait_s: float, interface: str | None = None, use_gpu: bool = False) -> None:
        super().__init__(host=host, wait_s=wait_s, interface=interface)
        self.needs_offers = use_gpu

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        gpus = shared_gpus(rank_infos, offers) if self.needs_offers else [None] * len(rank_infos)
        environments = self._rendezvous.open(rank_infos)
        return [{"environment": each, "gpus": shared} for each, shared in zip(environments, gpus, strict=True)]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._enter(settings.get("environment", {}))
        torch = sys.modules.get("torch")
        if settings.get("gpus") is not None and not (torch is not None and torch.cuda.is_initialized()):
            see_gpus(settings["gpus"], self.offer()["gpus"])


def check_host_name() -> None:
    """Raise an error if this machine cannot resolve its own name: `hvd.init()` would end the
    process with SIGSEGV, also if its interface is chosen."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ConfigError(
            f"Horovod cannot start on this machine, because its own name {name!r} does not resolve ({error}): add a line with the "
            "machine's address and this name to its /etc/hosts"
        ) from error


def watch_init(connections: Connections) -> None:
    """Make every later `hvd.init()` in this process record the sockets that it opens, for every
    framework, whether its module was imported already or not."""
    basics = foreign.basics()
    original = inspect.unwrap(basics.init)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_host_name()
        connections.opening()
        try:
            return original(self, *args, **kwargs)
        finally:
            connections.opened()

    basics.init = init
    for name, module in list(sys.modules.items()):
        bound = getattr(module, "init", None) if name.startswith("horovod.") else None
        if inspect.ismethod(bound) and isinstance(bound.__self__, basics):
            module.init = types.MethodType(init, bound.__self__)  # type: ignore[attr-defined]


def shut_down(close_connections: Callable[[], object], *, limit_s: float) -> None:
    """Shut Horovod down. All ranks leave together as soon as one does. If a peer does not respond
    within a second, close the connections, so that this rank stops waiting. Close them in any case:
    Horovod leaves them open, and peers may be waiting on them."""
    thread = threading.Thread(target=_shut_down, name="horovod-shutdown", daemon=True)
    thread.start()
    thread.join(GRACE_S)
    close_connections()
    thread.join(limit_s)


def _shut_down() -> None:
    with _shutdown_lock:
        for name in FRAMEWORKS:
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "shutdown"):
                module.shutdown()


def is_interruption(error: BaseException) -> bool:
    """Whether this error, or one that caused it, means that a peer failed."""
    exceptions = sys.modules.get("horovod.common.exceptions")
    if exceptions is None:
        return False
    for each in causes_of(error):
        if isinstance(each, exceptions.HorovodInternalError):
            return not MISTAKES.search(str(each))
        if isinstance(each, ValueError) and INIT_FAILED in str(each):
            return True
    return False

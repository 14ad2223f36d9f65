"""How torch ranks form and leave a process group, and how a waiting call is ended. Both."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.channel.network import LOOPBACK, allow_connections
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.core.ranks import RankInfo
from raysgd.environment import NCCL_ANYWHERE, flag_from_environment
from raysgd.errors import ConfigError, causes_of
from raysgd.torch import foreign
from raysgd.torch.group import nccl
from raysgd.torch.group.interfaces import choose_interface
from raysgd.torch.group.sockets import Connections, GlooConnections
from raysgd.torch.group.store import addresses_of, connect, exchange_addresses, open_store, wait_for_all, without_secret

# gloo raises plain RuntimeErrors. Only the names of its source files in the text distinguish them from a user's errors: not
# "ProcessGroupGloo::allgather: invalid tensor size", which is about the arguments of a call. The text without a name is that
# of the collectives that were waiting, too, when one exceeded its limit: other buckets of gradients.
GLOO = re.compile(
    r"gloo/(transport|rendezvous|context|algorithm|allreduce|broadcast|common)|ProcessGroupGloo(?!::)|\bgloo\b.*[Tt]imed out"
    r"|^Application timeout caused pair closure"
)

# A gloo rank that waits for a peer's connection cannot be interrupted, and the peer may have failed meanwhile. So this
# wait is short; all ranks are in the store when it begins.
FORM_S, RANKS_PER_S = 10.0, 10
SHUT_EVERY_S = 0.1


def name_for(asked: str | None, gpus: float) -> str:
    """Choose the backend for workers with so many GPUs each: the one that was `asked` for, or
    None's: NCCL if each has a GPU of its own, else gloo. Raise ConfigError if NCCL cannot work
    there."""
    if flag_from_environment(NCCL_ANYWHERE) or asked == "gloo":
        return asked or ("nccl" if gpus else "gloo")
    if asked == "nccl" and gpus < 1:
        has = f"{gpus:g} of a GPU" if gpus else "no GPU"
        raise ConfigError(
            f"backend='nccl' needs a GPU of its own for each worker, and a worker has {has}: pass use_gpu=True, without a part of a "
            "GPU in resources_per_worker, or leave backend out: it is 'gloo' here"
        )
    return "nccl" if gpus >= 1 else "gloo"


class TorchBackend(ProcessGroupBackend):
    """On the driver, owns the store of the current generation: a new one each time, on a port that
    is bound. On a worker, owns the membership of the default process group, and knows its sockets,
    and whether it was aborted."""

    shares = True

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        join_s: float = 60.0,
        collective_s: float = 540.0,
        in_place: bool = True,
    ) -> None:
        self.name, self.in_place = name, in_place
        self._host, self._join_s, self._collective_s = host, join_s, collective_s
        self._store: Any = None
        self._store_before: Any = None
        self._groups: list[Any] = []
        self._groups_before: list[Any] = []
        self._counter: Callable[[], int] | None = None
        self._counted: Any = None  # the default group whose counter this is
        self._connections = Connections(listening=True)
        self._gloo = GlooConnections()
        self._rank_info = RankInfo(solo=True)
        self._ending = nccl.Abort()  # of this generation
        self._whole_after = -1  # how many calls had been made when what had arrived was whole

    def __getstate__(self) -> dict[str, Any]:
        # These, and the others, cannot be pickled.
        blanks = dict.fromkeys(("_store", "_store_before", "_counter", "_counted"))
        return {**vars(self), **blanks, "_groups": [], "_groups_before": []}

    # -- driver ---------------------------------------------------------------------------------------

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        # Closes the old store, so that ranks that still wait in it stop waiting. NCCL's threads look at it until the ranks
        # have left the old group, which they do when they join the new one.
        self._store_before = self._store if rank_infos and self.name == "nccl" else None
        self._store = None
        if not rank_infos:
            return []
        # torch asks the name server for the name of every address that connects, and a lost answer costs 5 s. The name of
        # this address is in a file.
        host = LOOPBACK if all(each.local for each in rank_infos) else self._host
        self._store, settings = open_store(host, limit_s=self._join_s)
        return [dict(settings) for _ in rank_infos]

    # -- worker ---------------------------------------------------------------------------------------

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        os.environ.setdefault("GLOO_DISABLE_CONNECTION_RETRIES", "1")  # it would retry only peers that have failed
        self._rank_info = rank_info
        if self.name == "nccl":
            nccl.set_variables()
            self._connections.opening()
        try:
            with without_secret(settings):
                self._form(rank_info, settings)
        finally:
            self._connections.forget()  # from here on, an abort ends NCCL's
            self._keep_groups()

    def _form(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        gloo = self.name == "gloo"
        self._gloo.forget()
        if not rank_info.solo:
            self._gloo.add_store(addresses_of(settings))
        form_s = min(FORM_S + rank_info.world_size / RANKS_PER_S, self._collective_s) if gloo else self._collective_s
        if gloo and not rank_info.solo:
            # To each peer, also in one more group of the user.
            allow_connections(rank_info.world_size, each=8)
        if not rank_info.solo:
            choose_interface(rank_info, settings["host"])
        store = dist.HashStore() if rank_info.solo else self._connect(settings)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"generation-{rank_info.generation}", store)  # type: ignore[attr-defined]
        wait_for_all(store, rank_info, limit_s=self._join_s)
        arguments: dict[str, Any] = {"store": store, "rank": rank_info.world_rank, "world_size": rank_info.world_size}
        arguments["timeout"] = datetime.timedelta(seconds=form_s)
        if gloo:
            self._form_gloo(rank_info, arguments)
        else:
            nccl.form(**arguments)
            self._check_not_aborted()  # an abort that has found no group is noted by now
            nccl.use()
        self._counter, self._counted = foreign.collective_counter(), dist.group.WORLD

    def _form_gloo(self, rank_info: RankInfo, arguments: dict[str, Any]) -> None:
        with self._gloo.forming():
            dist.init_process_group("gloo", **arguments)
        self._gloo.add_remote(exchange_addresses(arguments["store"], rank_info, self._gloo.own, limit_s=self._join_s))
        # The first collective uses each connection, so that a failure of one is a failure to join: a stranger can have taken a
        # peer's place, and a call that comes later would wait for it until a longer limit.
        dist.all_to_all_single(torch.empty(rank_info.world_size), torch.zeros(rank_info.world_size))
        self._gloo.hold()
        foreign.set_collective_limit(self._collective_s)

    def _connect(self, settings: dict[str, Any]) -> Any:
        return connect(settings, limit_s=self._join_s)

    def leave(self) -> None:
        self._counter = self._counted = None
        self._keep_groups()
        if self._groups:
            self._groups_before, self._groups = self._groups, []
        self.abort()
        self._ending.wait()
        if self.name == "nccl" and dist.is_initialized():
            foreign.forget_groups()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a broken group may refuse an orderly end
                dist.destroy_process_group()
        self._gloo.end()
        self._ending, self._whole_after = nccl.Abort(), -1

    def abort(self) -> None:
        """Free this rank from a collective that waits. gloo cannot abort one, but the end of its
        connections ends it within a millisecond. NCCL's groups stay known to torch, so no code
        takes this rank for one without peers."""
        ending, info = self._ending, self._rank_info
        ending.noted = True  # first, because `ensure_whole` looks at it after its wait
        process_groups = foreign.groups() if self.name == "nccl" and dist.is_initialized() else []
        if process_groups and self._ending is ending:  # otherwise, these are the groups of the next generation
            self._groups = process_groups
            ending.begin(process_groups, limit_s=nccl.abort_limit_s(info.world_rank, info.world_size))
        if self._connections.shut():
            threading.Thread(target=self._shut_later_ones, args=(ending,), name="raysgd-shut", daemon=True).start()
        self._gloo.shut()

    def _shut_later_ones(self, ending: nccl.Abort) -> None:
        """NCCL opens connections one after the other while it forms a group, and waits at each."""
        while self._ending is ending and self._connections.shut():
            time.sleep(SHUT_EVERY_S)

    def ensure_whole(self, *, unless_seen: bool = False) -> None:
        """With NCCL, wait for the device, and then look whether the group was aborted. gloo's calls
        have ended when they return, or raise an error."""
        if self.name != "nccl" or self._rank_info.world_size == 1:
            return
        calls = foreign.calls_made()
        if unless_seen and calls == self._whole_after >= 0:
            return
        nccl.wait_for_device()
        self._check_not_aborted()
        self._whole_after = calls
        self._groups_before = []  # they hold buffers of their last calls: up to a copy of all gradients

    def _check_not_aborted(self) -> None:
        if self._ending.noted:
            raise dist.DistBackendError("what this rank has received may be incomplete, because a peer failed")

    def _keep_groups(self) -> None:
        """Keep references to the process groups of a generation until the next generation ends. The
        last reference must not be in a wrapped model, for example in the traceback of the error
        that ended the generation: such a reference destroys a group while it holds the
        interpreter's lock, and waits for the group's threads, which wait for that lock. A Python
        handle releases the lock first."""
        if dist.is_initialized():
            self._groups = foreign.groups()

    def collectives(self) -> int:
        if dist.group.WORLD is not self._counted:  # a user's function has formed the group again
            self._counter, self._counted = foreign.collective_counter(), dist.group.WORLD
        try:
            return -1 if self._counter is None else self._counter()
        except RuntimeError:
            return -1

    def is_interruption(self, error: BaseException) -> bool:
        """Whether a peer or the network failed, by the error's type or, for gloo, its text. An
        error that was raised while such an error was handled counts, too."""
        return any(
            isinstance(each, dist.DistError) or (isinstance(each, RuntimeError) and GLOO.search(str(each)) is not None)
            for each in causes_of(error)
        )

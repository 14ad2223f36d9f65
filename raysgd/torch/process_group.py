"""How torch ranks meet, part, and are freed from a collective that waits for somebody who is gone."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.ranks import RankInfo
from raysgd.torch.foreign import abort_default_group, collective_count, groups, set_collective_limit
from raysgd.torch.sockets import Connections, GlooConnections
from raysgd.torch.store import addresses_of, enter, exchange, open_store, wait_for_all, without_secret

__all__ = ["TorchBackend"]

# gloo raises plain RuntimeErrors: only its own file names in the text tell them from a user's.
GLOO = re.compile(
    r"gloo/(transport|rendezvous|context|algorithm|allreduce|broadcast|common)|ProcessGroupGloo|\bgloo\b.*[Tt]imed out"
)

# A rank of gloo's that waits for a peer to connect to it cannot be called off, and the peer may have died on its way. So
# that wait is a short one: all are in the store when it begins.
MEET_S, RANKS_PER_S = 10.0, 10


class TorchBackend:
    """On the driver: owns the store of the generation that stands (its port is bound, not guessed, and it is new each
    time). On a worker: owns the membership of the default process group, and knows its sockets."""

    needs_offers = False

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
        self._standing: list[Any] = []
        self._past: list[Any] = []
        self._connections = Connections()
        self._gloo = GlooConnections()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_standing": [], "_past": []}  # none of them can travel

    # -- driver ---------------------------------------------------------------------------------------

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        self._store = None  # closes the old one: whoever still waits in it is freed
        if not rank_infos:
            return []
        self._store, settings = open_store(self._host, limit_s=self._join_s)
        return [dict(settings) for _ in rank_infos]

    # -- worker ---------------------------------------------------------------------------------------

    def offer(self) -> dict[str, Any]:
        return {}

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        os.environ.setdefault("GLOO_DISABLE_CONNECTION_RETRIES", "1")  # whom it would try again has died
        if self.name != "gloo":
            self._connections.opening()
        try:
            with without_secret(settings):
                self._form(rank_info, settings)
        finally:
            self._connections.opened()
            self._hold()

    def _form(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        gloo = self.name == "gloo"
        meet_s = min(MEET_S + rank_info.world_size / RANKS_PER_S, self._collective_s) if gloo else self._collective_s
        if gloo and not rank_info.solo:
            self._gloo.add_remote(addresses_of(settings))
        store = dist.HashStore() if rank_info.solo else self._client(settings)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"generation-{rank_info.generation}", store)  # type: ignore[attr-defined]
        wait_for_all(store, rank_info, limit_s=self._join_s)
        with self._gloo.forming() if gloo else contextlib.nullcontext():
            dist.init_process_group(
                self.name,
                store=store,
                rank=rank_info.world_rank,
                world_size=rank_info.world_size,
                timeout=datetime.timedelta(seconds=meet_s),
            )
        if gloo:
            self._gloo.add_remote(exchange(store, rank_info, self._gloo.own))
        # The first collective makes every connection now, where its failure belongs to the meeting.
        dist.all_reduce(torch.zeros(1, device="cuda" if self.name == "nccl" else "cpu"))
        if gloo:
            set_collective_limit(self._collective_s)

    def _client(self, settings: dict[str, Any]) -> Any:
        return enter(settings, limit_s=self._join_s)

    def leave(self) -> None:
        self._hold()
        if self._standing:
            self._past, self._standing = self._standing, []
        self.abort()
        self._connections.forget()
        self._gloo.forget()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a group that broke may refuse an orderly end
                dist.destroy_process_group()

    def abort(self) -> None:
        """gloo has no abort that frees a waiting collective; shutting its sockets down does, within a millisecond."""
        if self.name == "nccl" and dist.is_initialized():
            self._hold()
            abort_default_group()
        self._connections.shut()
        self._gloo.shut()

    def _hold(self) -> None:
        """Keeps the groups of a generation until the next one ends: a wrapped model, in the traceback of the error that
        ends this one perhaps, must not be their last holder. It would end them with the interpreter's lock held, and
        wait for threads of theirs that wait for that lock; a handle like these gives it away first."""
        if dist.is_initialized():
            self._standing = groups()

    def collectives(self) -> int:
        return collective_count()

    def is_interruption(self, error: BaseException) -> bool:
        """By type where torch gives one; a user's exception that was raised while handling one counts too."""
        seen: BaseException | None = error
        for _ in range(10):
            if seen is None:
                return False
            if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and GLOO.search(str(seen))):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

"""Simulate rendezvous and collectives: the ranks of a generation find each other, communicate, and fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.core.ranks import RankInfo
from tests.simulation.world import Process, Wake, World

__all__ = ["NetworkError", "ProcessGroup", "Rendezvous", "SimBackend"]


class NetworkError(RuntimeError):
    """What a rank gets when a peer or the network failed."""


class Collective:
    """One collective operation: the values of the ranks, and which of them are still waiting for it."""

    def __init__(self) -> None:
        self.values: dict[Process, Any] = {}
        self.waiting: dict[Process, Wake] = {}
        self.complete = False


class ProcessGroup:
    """The ranks of one generation. A collective ends when all ranks have called it. Each rank sees that a little later,
    or sees the failure of a peer first."""

    def __init__(self, world: World, generation: int, members: Sequence[Process]) -> None:
        self.world, self.generation, self.members = world, generation, list(members)
        self.left: set[Process] = set()
        self._turn = dict.fromkeys(members, 0)
        self._collectives: dict[int, Collective] = {}

    def collective(self, member: Process, value: Any, limit_s: float) -> list[Any]:
        """Return every member's value, in rank order."""
        number = self._turn[member]
        self._turn[member] += 1
        current = self._collectives.setdefault(number, Collective())
        self._collectives.pop(number - 3, None)
        if self.left:
            member.sleep(self.world.between(0.0, 0.002))
            raise NetworkError("a peer has left the process group")
        current.values[member] = value
        wake = current.waiting[member] = Wake(member)
        if len(current.values) == len(self.members):
            current.complete = True
            for other, waiting in current.waiting.items():
                self._end(other, waiting, "complete", 0.003)
        else:
            member.at(limit_s, lambda: wake("timed out"))
        how = wake.wait()
        del current.waiting[member]
        if how != "complete":
            self.leave(member)
            raise NetworkError(f"the collective {how}")
        return [current.values[each] for each in self.members]

    def begun(self, member: Process) -> int:
        """Return how many collectives this member has begun."""
        return self._turn[member]

    def waits(self, member: Process) -> bool:
        return any(member in each.waiting for each in self._collectives.values())

    def leave(self, member: Process, *, silently: bool = False) -> None:
        """Close the connections of this member, unless its machine vanished. Ranks that wait for it fail soon."""
        if member in self.left:
            return
        if silently:
            return
        self.left.add(member)
        for current in self._collectives.values():
            for other, wake in current.waiting.items():
                self._end(other, wake, "failed: a peer left", 0.004)

    def _end(self, member: Process, wake: Wake, how: str, most_s: float) -> None:
        member.at(self.world.between(0.0, most_s), lambda: wake(how))


class Rendezvous:
    """Where the ranks of one generation find each other, until the driver closes it."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self._size = world, size
        self.closed = False
        self.group: ProcessGroup | None = None
        self._here: dict[int, Process] = {}
        self._waiting: dict[Process, Wake] = {}

    def enter(self, member: Process, rank_info: RankInfo, limit_s: float) -> ProcessGroup:
        """Wait until all ranks have arrived."""
        if self.closed:
            raise NetworkError("the rendezvous of this generation is over")
        self._here[rank_info.world_rank] = member
        wake = self._waiting[member] = Wake(member)
        if len(self._here) == self._size:
            members = [self._here[rank] for rank in range(self._size)]
            self.group = ProcessGroup(self.world, rank_info.generation, members)
            for failed in [each for each in members if not each.alive]:
                self.group.left.add(failed)
            for other, waiting in self._waiting.items():
                other.at(self.world.between(0.0, 0.01), lambda waiting=waiting: waiting("complete"))
        else:
            member.at(limit_s, lambda: wake("timed out"))
        how = wake.wait()
        self._waiting.pop(member, None)
        if how != "complete":
            raise NetworkError(f"the rendezvous {how}")
        assert self.group is not None
        return self.group

    def call_off(self, member: Process) -> None:
        if member in self._waiting:
            self._waiting[member]("was called off")

    def close(self) -> None:
        self.closed = True
        for wake in list(self._waiting.values()):
            wake("was closed by the driver")


class SimBackend:
    """Implements `raysgd.core.protocols.ProcessGroupBackend`. The one on the driver plans, and the one in each worker
    joins."""

    needs_offers = True  # as TensorFlow's backend does, because a worker can then also fail while it makes an offer

    def __init__(self, world: World, *, in_place: bool, join_s: float, collective_s: float, member: Any = None) -> None:
        self.world, self.in_place = world, in_place
        self.join_s, self.collective_s, self._member = join_s, collective_s, member
        self.group: ProcessGroup | None = None
        self._rendezvous: Rendezvous | None = None
        self._joined = False

    # -- driver ---------------------------------------------------------------------------------------

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        assert len({offer["worker"] for offer in offers}) == len(rank_infos), "one offer of each worker"
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = Rendezvous(self.world, len(rank_infos)) if rank_infos else None
        return [{"rendezvous": self._rendezvous} for _ in rank_infos]

    # -- worker ---------------------------------------------------------------------------------------

    def offer(self) -> dict[str, Any]:
        self._member.sleep(self.world.between(0.0005, 0.01))
        return {"worker": self._member.name}

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        if self._joined and not self.in_place and not rank_info.solo:
            raise RuntimeError("a process of this backend can join only one generation")
        self._member.sleep(self.world.between(0.0005, 0.01))
        if rank_info.solo:
            return
        self._joined = True
        self._rendezvous = settings["rendezvous"]
        try:
            group = self._rendezvous.enter(self._member, rank_info, self.join_s)
        finally:
            self._rendezvous = None
        self.group = group
        self._member.sleep(self.world.between(0.0005, 0.01))
        if self.group is not group:
            raise NetworkError("the rendezvous was called off")
        group.collective(self._member, None, self.join_s)
        self._member.formed(group)

    def leave(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.call_off(self._member)
        if self.group is not None:
            self.group.leave(self._member)
            self.group = None

    def collectives(self) -> int:
        return -1 if self.group is None else self.group.begun(self._member)

    def is_interruption(self, error: BaseException) -> bool:
        return isinstance(error, NetworkError)

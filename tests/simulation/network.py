"""Simulate links, rendezvous and collectives: the ranks of a generation find each other, communicate, and fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from raysgd.core.protocols import ProcessGroupBackend
from raysgd.core.ranks import RankInfo
from tests.simulation.world import Process, Wake, World

__all__ = ["DRIVER", "Link", "Network", "NetworkError", "ProcessGroup", "Rendezvous", "SimBackend"]

DRIVER = "driver"


class NetworkError(RuntimeError):
    """What a rank gets when a peer or the network failed."""


class Network:
    """Knows which machines cannot reach each other at the moment. Nothing is lost on a blocked link, unless its
    connection ends: what was sent arrives when the link is open again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._blocked: dict[tuple[str, str], tuple[float, float]] = {}  # since when, and until when

    def block(self, machine: str, other: str, seconds: float) -> None:
        """Block the link between two machines. With "" for the other one, block all links of this machine."""
        now = self._world.now
        since, until = self._blocked.get((machine, other), (now, 0.0))
        self._blocked[machine, other] = (since if until > now else now, max(until, now + seconds))

    def _blocks(self, one: str, other: str) -> list[tuple[float, float]]:
        """Return since when and until when this link is blocked, for each reason."""
        if not self._blocked or one == other:
            return []
        keys = ((one, other), (other, one), (one, ""), (other, ""))
        return [block for key in keys if (block := self._blocked.get(key)) is not None and block[1] > self._world.now]

    def wait_s(self, one: str, other: str) -> float:
        """Return for how long the link between these machines stays blocked, 0 if it is open."""
        return max((until - self._world.now for _, until in self._blocks(one, other)), default=0.0)

    def blocked_at(self, one: str, other: str) -> float | None:
        """Return since when the link between these machines is blocked, None if it is open."""
        return min((since for since, _ in self._blocks(one, other)), default=None)

    def wait_among_s(self, machines: Sequence[str]) -> float:
        """Return how long it takes until each of these machines can reach each other one."""
        if not self._blocked:
            return 0.0
        return max((self.wait_s(one, other) for one, other in combinations(dict.fromkeys(machines), 2)), default=0.0)


class Link:
    """Delivers messages between the driver and a worker in order, each after its own delay."""

    def __init__(self, world: World, network: Network, machine: str, slowest_s: float, late: float) -> None:
        self._world, self._network, self._machine = world, network, machine
        self._slowest_s, self._late, self._last = slowest_s, late, 0.0
        self._sent: deque[Callable[[], Any]] = deque()

    def send(self, deliver: Callable[[], Any], *, at_least_s: float = 0.0) -> None:
        world = self._world
        delay = at_least_s + world.between(0.0001, self._slowest_s)
        if world.random.random() < self._late:
            delay += world.between(0.0, 0.5)
        self._last = max(self._last + 1e-6, world.now + delay)
        self._sent.append(deliver)
        world.at(self._last - world.now, self._arrive)

    def _arrive(self) -> None:
        blocked_s = self._network.wait_s(self._machine, DRIVER)
        if blocked_s:
            self._world.at(blocked_s + 1e-6, self._arrive)
        else:
            self._sent.popleft()()


class Collective:
    """One collective operation: the values of the ranks, and which of them are still waiting for it."""

    def __init__(self) -> None:
        self.values: dict[Process, Any] = {}
        self.waiting: dict[Process, Wake] = {}


class ProcessGroup:
    """The ranks of one generation. A collective ends when all ranks have called it. Each rank sees that a little later,
    or sees the failure of a peer first."""

    def __init__(self, world: World, network: Network, generation: int, members: Sequence[Any]) -> None:
        self.world, self._network, self.generation, self.members = world, network, generation, list(members)
        self._machines = [member.node.name for member in members]
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
            self._complete(current)
        member.at(limit_s, lambda: wake("timed out"))
        how = wake.wait()
        del current.waiting[member]
        if how != "complete":
            self.leave(member)
            raise NetworkError(f"the collective {how}")
        return [current.values[each] for each in self.members]

    def _complete(self, current: Collective) -> None:
        blocked_s = self._network.wait_among_s(self._machines)
        if blocked_s:
            self.world.at(blocked_s + 1e-6, lambda: self._complete(current))
            return
        for other, waiting in current.waiting.items():
            self._end(other, waiting, "complete", 0.003)

    def begun(self, member: Process) -> int:
        """Return how many collectives this member has begun."""
        return self._turn[member]

    def waits(self, member: Process) -> bool:
        return any(member in each.waiting for each in self._collectives.values())

    def leave(self, member: Any, *, silently: bool = False) -> None:
        """Close the connections of this member, unless its machine vanished. Ranks that wait for it fail soon."""
        for current in self._collectives.values():
            if member in current.waiting:
                self._end(member, current.waiting[member], "was aborted", 0.001)
        if member not in self.left and not silently:
            self._peer_left(member)

    def _peer_left(self, member: Any) -> None:
        blocked_s = self._network.wait_among_s(self._machines)
        if blocked_s:
            self.world.at(blocked_s + 1e-6, lambda: self._peer_left(member))
            return
        self.left.add(member)
        for current in self._collectives.values():
            for other, wake in current.waiting.items():
                self._end(other, wake, "failed: a peer left", 0.004)

    def _end(self, member: Process, wake: Wake, how: str, most_s: float) -> None:
        member.at(self.world.between(0.0, most_s), lambda: wake(how))


class Rendezvous:
    """Where the ranks of one generation find each other, through a store on the driver, until the driver closes it."""

    def __init__(self, world: World, network: Network, size: int) -> None:
        self.world, self._network, self._size = world, network, size
        self.closed = False
        self.group: ProcessGroup | None = None
        self._here: dict[int, Any] = {}
        self._waiting: dict[Any, Wake] = {}

    def enter(self, member: Any, rank_info: RankInfo, limit_s: float) -> ProcessGroup:
        """Wait until all ranks have arrived."""
        blocked_s = self._network.wait_s(member.node.name, DRIVER)
        if blocked_s:
            member.sleep(min(blocked_s, limit_s))
        if self.closed or blocked_s > limit_s:
            raise NetworkError("the rendezvous of this generation is over")
        self._here[rank_info.world_rank] = member
        wake = self._waiting[member] = Wake(member)
        if len(self._here) == self._size:
            members = [self._here[rank] for rank in range(self._size)]
            self.group = ProcessGroup(self.world, self._network, rank_info.generation, members)
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
        for member, wake in list(self._waiting.items()):
            blocked_s = self._network.wait_s(member.node.name, DRIVER)
            self.world.at(blocked_s, lambda wake=wake: wake("was closed by the driver"))


class SimBackend(ProcessGroupBackend):
    """The one on the driver plans, and the one in each worker
    joins."""

    needs_offers = True  # as TensorFlow's backend does, because a worker can then also fail while it makes an offer

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        in_place: bool,
        shares: bool = True,
        join_s: float,
        collective_s: float,
        member: Any = None,
    ) -> None:
        self.world, self._network, self.in_place, self.shares = world, network, in_place, shares
        self.join_s, self.collective_s, self._member = join_s, collective_s, member
        self.group: ProcessGroup | None = None
        self._rendezvous: Rendezvous | None = None
        self._joined = False

    # -- driver ---------------------------------------------------------------------------------------

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        assert len({offer["worker"] for offer in offers}) == len(rank_infos), "one offer of each worker"
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = Rendezvous(self.world, self._network, len(rank_infos)) if rank_infos else None
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

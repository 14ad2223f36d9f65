"""Runs of real replicas as threads that take turns, while ranks fail, join and leave. The gradients are exchanged in memory.

run = Group(Operator, config, settings, workers=3).run(epochs=2, changes=[Change("kill", 4, victims=(1,))])
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch

from raysgd.core.outcomes import Interrupted
from raysgd.core.progress import Control, most_advanced
from raysgd.core.ranks import RankInfo
from raysgd.torch.replica import TorchReplica, TorchReplicaFactory
from raysgd.torch.settings import TorchSettings
from tests.torch.simulated import Mean, weights_of

LIMIT_S = 60


class Killed(BaseException):
    """Ends the thread of a rank, as SIGKILL ends a process."""


class PeerLost(Exception):
    """What the other ranks' exchange raises."""


@dataclass(frozen=True)
class Change:
    """What happens at batch number `step` of a run, counted from 0.

    kill     the victims end: "before" they compute, "after" they have applied the step, or "during" the exchange, whose
             result only the `heirs` among the others get
    resize   a planned change at a batch boundary: the victims leave
    join     how many ranks join afterwards
    """

    kind: Literal["kill", "resize"]
    step: int
    victims: tuple[int, ...] = ()
    join: int = 0
    when: Literal["before", "during", "after"] = "before"
    heirs: tuple[int, ...] = ()


class Turns:
    """One call on all ranks. Their threads run one at a time, in the order of their ranks, each until it waits for the others. So a seed
    determines everything."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._ranks, self._rounds, self._turn = ranks, 0, 0
        self._ready = set(range(ranks))
        self._brought: dict[int, Any] = {}
        self._given: list[Any] = []

    def begin(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == rank, LIMIT_S), (
                f"rank {rank} has waited for {LIMIT_S} s"
            )

    def end(self, rank: int) -> None:
        """Note that a rank has returned, or failed."""
        self._ready.discard(rank)
        self._pass_on()

    def together(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks bring, in the order of the ranks."""
        self._brought[rank] = value
        rounds = self._rounds
        if len(self._brought) == self._ranks:
            self._given, self._brought = [self._brought[each] for each in range(self._ranks)], {}
            self._rounds += 1
            self._ready = set(range(self._ranks))
            return self._given
        self._ready.discard(rank)
        self._pass_on()
        self.begin(rank)
        if self._rounds == rounds:
            raise PeerLost
        return self._given

    def _pass_on(self) -> None:
        """Give the turn to the next rank that can run. If some wait for a rank that is gone, they learn it now."""
        if not self._ready and self._brought:
            self._ready, self._brought = set(self._brought), {}
        with self._changed:
            following = [(self._turn + 1 + each) % self._ranks for each in range(self._ranks)]
            self._turn = next((rank for rank in following if rank in self._ready), -1)
            self._changed.notify_all()


class TurnMean(Mean):
    """The mean over the ranks of a `Group`'s present generation."""

    def __init__(self, group: "Group") -> None:
        self._group, self._arrived, self._held = group, False, False
        self.rank = 0

    def _exchange(self) -> None:
        self._arrived = False
        with torch.no_grad():
            brought = self._group.turns.together(self.rank, [p.grad.clone() for p in self._parameters])
            self._group.tear(self.rank)
            for parameter, each in zip(self._parameters, zip(*brought, strict=True), strict=True):
                parameter.grad.copy_(torch.stack(each).mean(0))


class Group:
    """Stands for the engine and its workers. `reorder` is a seed that permutes the samples within each step of `together`
    samples, which changes nothing but the order of the sums."""

    def __init__(
        self,
        operator: Any,
        config: dict[str, Any],
        settings: TorchSettings,
        *,
        workers: int,
        reorder: int | None = None,
    ) -> None:
        self.config, self._reorder, self._together = config, reorder, workers * config["batch"]
        settings = replace(settings, exchange=lambda: TurnMean(self), distributed=True, wrap_ddp=False)
        self._factory = TorchReplicaFactory(operator, {**config, "group": self}, settings)
        self._snapshot: bytes | None = None
        self._change: Change | None = None
        self._tearing = False
        self._here = threading.local()
        self._noted: dict[int, tuple[int, int, list[int]]] = {}
        self.generation = 0
        self.replicas = [self._new(RankInfo(world_rank=rank, world_size=workers)) for rank in range(workers)]
        self._enter()

    def run(self, epochs: int, changes: Sequence[Change]) -> torch.Tensor:
        """Return the weights after these epochs, which must be the same on all ranks."""
        left = list(changes)
        with patch("raysgd.torch.data.sources.agree", self._agree):
            for call in range(1, epochs + 1):
                while True:
                    self._change = left[0] if left else None
                    ended = self._call(call)
                    if self._change is None and left:  # it has happened
                        self._regroup(left.pop(0))
                    elif all(isinstance(each, dict) for each in ended):
                        break
        vectors = [weights_of(replica) for replica in self.replicas]
        assert all(torch.equal(vectors[0], each) for each in vectors)
        for replica in self.replicas:
            replica.close()
        return vectors[0]

    # -- called by the ranks --------------------------------------------------------------------------

    def note(self, epoch: int, step: int, samples: list[int]) -> None:
        """Note which samples an attempt at a step has."""
        kept = self._noted.get(step)
        if kept is None or kept[0] != self.generation:
            kept = self._noted[step] = (self.generation, epoch, [])
        kept[2].extend(samples)

    def committed(self, epochs: int) -> list[list[list[int]]]:
        """Return the samples of each step of each epoch: of its last attempt. Repeated ones count once."""
        found: list[list[list[int]]] = [[] for _ in range(epochs)]
        done = self.replicas[0].progress.step  # ranks may have begun later steps, of which fewer were left in the end
        for step in sorted(each for each in self._noted if each < done):
            _, epoch, samples = self._noted[step]
            found[epoch].append(sorted(set(samples)))
        return found

    def before(self, rank: int, step: int) -> None:
        change = self._change
        if change is None or change.kind != "kill" or rank not in change.victims or step < change.step:
            return
        if change.when == "before":
            self._change = None
            raise Killed
        self._tearing = change.when == "during"

    def tear(self, rank: int) -> None:
        """Let an exchange have a result on some ranks only."""
        change = self._change
        if self._tearing and change is not None and rank not in change.heirs:
            raise Killed if rank in change.victims else PeerLost

    def after(self, rank: int, step: int) -> None:
        change = self._change
        if change is None or (change.when, change.kind) != ("after", "kill") or rank not in change.victims:
            return
        if step >= change.step:
            self._change = None
            raise Killed

    # -- generations ----------------------------------------------------------------------------------

    def _call(self, call: int) -> list[Any]:
        """Let all ranks continue a call of `train`. Return what each returned or raised."""
        change = self._change
        self.turns = turns = Turns(len(self.replicas))
        for replica in self.replicas:
            replica._control.clear()
            if change is not None and change.kind == "resize":
                replica._control.propose(change.step)
                replica._control.confirm()
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            ended = list(threads.map(lambda replica: self._train(replica, call, turns), self.replicas))
        self._stale = False
        for each in ended:
            if isinstance(each, BaseException) and not isinstance(each, (Killed, PeerLost)):
                raise each
        if self._tearing or any(isinstance(each, Interrupted) for each in ended):
            self._change, self._tearing = None, False
        return ended

    def _train(self, replica: TorchReplica, call: int, turns: Turns) -> Any:
        self._here.rank = self.replicas.index(replica)
        turns.begin(self._here.rank)
        try:
            ended = replica.train(call, None, False, None, snapshot_first=self._stale)
        except BaseException as error:
            ended = error
        turns.end(self._here.rank)
        return ended

    def _regroup(self, change: Change) -> None:
        """Form a generation of those that are left and those that join. The most advanced state is that of all."""
        staying = [each for rank, each in enumerate(self.replicas) if rank not in change.victims]
        for rank, each in enumerate(self.replicas):
            each._snapshots.wait()
            if rank in change.victims:
                each._snapshots.close()
        state = self._snapshot
        if staying:
            known = {str(number): each.progress for number, each in enumerate(staying)}
            source = staying[int(most_advanced(known))]
            state = bytes(source.state())
            for each in staying:
                if each.progress.order != source.progress.order:
                    each.load(state)
        new = [self._new(RankInfo(solo=True)) for _ in range(change.join)]
        for each in new:
            each.load(state)
        self.replicas = [*staying, *new]
        self._enter()
        for rank, each in enumerate(self.replicas):
            each.joined(RankInfo(world_rank=rank, world_size=len(self.replicas), generation=self.generation))

    def _enter(self) -> None:
        self.generation += 1
        self._stale = True  # the next call begins with a snapshot
        for rank, each in enumerate(self.replicas):
            exchange: Any = each.operator._parts.exchange
            exchange.rank = rank

    def _new(self, rank_info: RankInfo) -> TorchReplica:
        control = Control()
        control.upload = self._keep
        return self._factory(rank_info, control)

    def _keep(self, message: Any, *content: Any) -> None:
        self._snapshot = b"".join(map(bytes, content))

    def _agree(self, order: Any, recipe: Any, *, first: bool) -> tuple[Any, None]:
        """Return rank 0's order on all ranks."""
        given = torch.as_tensor(self.turns.together(self._here.rank, order)[0])
        if self._reorder is None:
            return given, None
        generator = torch.Generator().manual_seed(self._reorder)
        steps = given.split(self._together)
        return torch.cat([step[torch.randperm(len(step), generator=generator)] for step in steps]), None

"""Simulated runs of a sharded model: each rank holds a shard, and survivors without all of them load a checkpoint.

What a worker holds is complete, so that its steps can be checked, but it counts as one shard of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.core.shard_copies import ShardCopy, ShardedState, agreed, covered, layout
from raysgd.core.snapshot import Ask, Snapshot
from raysgd.errors import TrainingFailedError
from raysgd.training.loading import Refusal, take_over
from raysgd.training.within_call import Contents
from raysgd.workers.calls import Blob
from tests.simulation.group import Large
from tests.simulation.network import NetworkError, ProcessGroup
from tests.simulation.replica import SimReplica
from tests.simulation.scenario import Script

__all__ = ["ShardedReplica", "ShardedScript"]


class ShardedReplica(SimReplica):
    """Changes its shards in the same order as `Resharding`."""

    in_shards = True

    def __init__(self, worker: Any, plan: Any, rank_info: RankInfo, control: Any) -> None:
        super().__init__(worker, plan, rank_info, control)
        self._live = (-1 if rank_info.solo else rank_info.generation, *self._place(rank_info))
        self._earlier: dict[ShardCopy, bytes] = {}
        self._given: Any = None
        self._ready = self.is_lost = False

    def _place(self, rank_info: RankInfo) -> tuple[int, int]:
        count = layout(rank_info.world_size, self._plan.replicas)[1]
        return rank_info.world_rank % count, count

    def _together(self, value: Any) -> list[Any]:
        group = self._worker.backend.group
        if group is None:
            raise NetworkError("the process group was aborted")
        found: list[Any] = group.collective(self._worker, value, self._worker.backend.collective_s)
        return found

    def run(self, call: Call) -> Any:
        self._earlier = {}
        if call.method is not ShardedReplica.load_again:
            self._worker.checker.may_load_again = False
        return super().run(call)

    def _exchanged(self, group: ProcessGroup, given: Any) -> list[Any]:
        contributions = super()._exchanged(group, given)
        self._ready = True
        self._worker.point("message")
        self._together("the gradients are here")
        return contributions

    def _train_batch(self, step: Any, *batch: Any) -> None:
        super()._train_batch(step, *batch)
        self._ready = False

    def _copy(self) -> ShardCopy:
        (generation, index, count), at = self._live, self.progress
        return ShardCopy(generation, False, count, index, at.loads, at.applied, self._ready)

    def _held(self) -> dict[ShardCopy, bytes]:
        if self._given is not None:
            return {}
        usable = self._live[0] >= 0 and not (self._earlier and self.progress.loads < 0)
        return ({self._copy(): self._state()} if usable else {}) | self._earlier

    def hand_over(self, stay: list[int]) -> None:
        self._worker.point("hands over")
        rank = self._rank_info.world_rank
        self._together("shards")
        if rank in stay:
            copy = replace(self._copy(), handed=True, count=len(stay), index=stay.index(rank))
            self._earlier = {copy: self._state()}

    def joined(self, rank_info: RankInfo) -> None:
        super().joined(rank_info)
        held, given = self._held(), self._given
        everything = self._together((held, given is not None, self._state(), self._worker.name))
        place = (rank_info.generation, *self._place(rank_info))
        members = self._worker.checker.engine._table.members()  # only their shards are promised to be used
        promised = agreed([copies if name in members else [] for copies, *_, name in everything])
        agreement, self.is_lost = agreed([list(copies) for copies, *_ in everything]), False
        self._live = (-1, *place[1:])  # if a rank fails now, it may have a part of its new shards
        if all(given for _, given, *_ in everything):
            state = bytes(given)
        elif agreement is not None:
            found = agreement.generation, agreement.handed
            lead = min(agreement.holders.keys() - agreement.late)
            state = next(each for copy, each in everything[lead][0].items() if (copy.generation, copy.handed) == found)
            self._earlier = {copy: each for copy, each in held.items() if (copy.generation, copy.handed) == found}
        elif any(copies or given for copies, given, *_ in everything):
            self.steps, self.weights, self.undefined, self.is_lost, state = [], -1, True, True, self._state()
        else:
            state = everything[0][2]  # the first ranks begin with the first one's
        self._worker.checker.divides(lost=not (promised or all(given for _, given, *_ in everything)))
        self._together("shards")
        self._take(state)
        self._live, self._given, self._ready = place, None, False

    def state(self) -> memoryview:
        self._together("shards")
        return super().state()

    def checkpoint(self) -> Any:
        self._together("shards")
        return super().checkpoint()

    def save_within(self, transfer: str) -> None:
        self._together("shards")
        super().save_within(transfer)

    def load(self, data: Any, *, other_code: bool = False) -> None:
        self._worker.point("load_state_dict")
        self._given, self._earlier = data, {}

    def load_again(self, data: Blob, loads: int | None) -> Refusal | None:
        """Load what was saved or loaded last, because the ranks lack shards."""
        if not self._worker.checker.may_load_again:
            self._worker.checker.fail(f"{self._worker.name} loads a checkpoint, and its group has all shards")
        self._worker.compute()
        self._worker.point("restore")
        self._refuses = False
        replica: Any = self
        return take_over(replica, lambda: {"content": data.data}, loads)


class ShardedScript(Script):
    """Also knows from what the ranks could load the state. A function that the user calls on all changes it."""

    replica_cls = ShardedReplica

    def __init__(self, *given: Any) -> None:
        self._newest: Snapshot | None = None
        super().__init__(*given)

    def sharded_state(self) -> ShardedState:
        return ShardedState(self.plan.replicas, ShardedReplica.hand_over, self._newest_saved)

    def _newest_saved(self, wait: bool) -> Snapshot | None:
        self._note_written()
        return self._newest

    def _saved_within(self, contents: Contents) -> None:
        snapshot = replace(self._snapshot(None), progress=contents.progress, call=contents.progress.call)
        self._newest = replace(snapshot, partial=contents.part)

    def _snapshot(self, loads: int | None) -> Snapshot:
        assert self._saved is not None
        data, at = self._saved[0], self.engine.progress

        def load(ask: Ask) -> bool:
            return ask(Call(ShardedReplica.load_again, {"data": Large(data), "loads": loads})) is not None

        return Snapshot(progress=at, call=at.call, load=load)

    def _save(self) -> None:
        super()._save()
        self._newest = self._snapshot(None)

    def _load(self, refuses: int = -1) -> None:
        super()._load(refuses)
        if self._saved is not None and refuses < 0:
            self._newest = self._snapshot(self.engine.progress.loads)

    def _apply(self) -> None:
        self._newest = self._writing = None
        super()._apply()

    def _keeps_a_snapshot(self) -> bool:
        return True  # otherwise a failure ends the run with an error

    def _is_over(self, error: TrainingFailedError) -> bool:
        """Return whether the ranks lack shards, and there is no checkpoint."""
        if "a part of the model was lost" not in str(error):
            return False
        replicas = [self.group.workers[name].replica for name in self.engine._table.members()]
        copies = [each._copy() for each in replicas if isinstance(each, ShardedReplica)]
        if covered((each.index, each.count) for each in copies) and not self.checker.may_load_again:
            self.checker.fail("the call ends because shards are lost, and the workers that are left have all of them")
        if self._newest is not None:
            self.checker.fail("the call ends because shards are lost, and there is a checkpoint")
        return True

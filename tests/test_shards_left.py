"""Which workers with shards a new driver takes over, and with what they continue, without processes."""

from collections.abc import Sequence
from typing import Any

import pytest

from raysgd.config import ElasticConfig, Limits
from raysgd.core.outcomes import Left, Ok
from raysgd.core.progress import Progress
from raysgd.core.ranks import RankInfo
from raysgd.core.shard_copies import HeldSnapshot, Holding, ShardCopy, ShardedState
from raysgd.core.snapshot import Snapshot
from raysgd.engine.engine import Engine
from raysgd.engine.generation import Generation
from tests.fake_group import FakeGroup, SingleWorkerBackend, started

LIMITS = Limits.derive(timeout_s=10, hang_timeout_s=10, start_s=10)
SHARDED = ShardedState(1, id, id, id)


class Orphans(FakeGroup):
    """Workers that a driver has left in call 2 at step 10, of which each holds this."""

    def __init__(self, *held: Holding) -> None:
        super().__init__()
        self._held = {f"w{number}": each for number, each in enumerate(held)}
        self.outcomes["run"] = Ok([each for holding in held for each in holding.snapshots])

    def adopt(self) -> list[str]:
        self.events += [started(name, "10.0.0.1") for name in self._held]
        return list(self._held)

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        if verb == "attach":
            left = Left(RankInfo(world_rank=int(worker[1:]), world_size=len(self._held)), 2, [], self._held[worker])
            self.outcomes["attach"] = Ok(left, Progress(step=10, call=2))
        return super().submit(worker, verb, arguments, generation=generation)


def gathered(group: Orphans) -> tuple[Generation, list[str], Snapshot | None]:
    """Take the workers over. Return the members and the newest snapshot, too."""
    table = group.table()
    generation = Generation(table, SingleWorkerBackend(), LIMITS, factory=None, hook=None, sharded=SHARDED)
    generation.gather(table.adopt())
    return generation, table.members(), table.snapshots.latest()


def held(*copies: tuple[int, int, int], kept: Sequence[int] = ()) -> Holding:
    """Return what holds these copies, as (generation, index, count), and the shards of a snapshot of step 7."""
    snapshot = HeldSnapshot(Snapshot(progress=Progress(step=7), held=(1, 1)), 3, tuple(kept))
    found = [ShardCopy(generation, False, count, index) for generation, index, count in copies]
    return Holding(found, [snapshot] if kept else [])


@pytest.mark.parametrize(
    ("orphans", "members", "lacks"),
    [
        ([held((4, 0, 2)), held((4, 1, 2))], ["w0", "w1"], False),
        ([held((4, 0, 2)), held((4, 0, 2))], ["w0", "w1"], True),
        ([held((3, 1, 3)), held((4, 0, 2)), held((4, 1, 2))], ["w1", "w2"], False),
        ([held((3, 0, 2)), held((3, 1, 2)), held((4, 0, 2))], ["w2"], True),
        ([held((5, 0, 3), (4, 0, 2)), held((4, 1, 2)), held((4, 0, 2))], ["w0", "w1", "w2"], False),
        ([held((5, 0, 2), (4, 0, 2)), held((5, 1, 2)), held((4, 1, 2))], ["w0", "w1"], False),
        ([held(), held((4, 0, 1))], ["w1"], False),
    ],
    ids=[
        "all shards",
        "a shard is missing",
        "one was dismissed",
        "all that were dismissed",
        "one has joined the next generation",
        "a call has begun in it",
        "one holds nothing",
    ],
)
def test_which_workers_with_shards_are_taken_over(orphans: list[Holding], members: list[str], lacks: bool) -> None:
    generation, found, _ = gathered(Orphans(*orphans))
    assert found == members
    assert generation.lacks_shards(found) is lacks


def test_the_snapshot_of_which_workers_that_are_taken_over_hold_each_shard_is_known() -> None:
    for last, complete in ((2, True), (1, False)):
        generation, found, newest = gathered(Orphans(held((4, 0, 3), kept=[0, 1]), held((4, 2, 3), kept=[last])))
        assert generation.lacks_shards(found)
        assert (newest is not None and newest.progress.step == 7) is complete


@pytest.mark.parametrize(
    ("orphans", "reached", "attached"),
    [
        ([held((4, 0, 2)), held((4, 1, 2))], 9, True),
        ([held((4, 0, 3), kept=[0, 1]), held((4, 2, 3), kept=[2])], 7, True),
        ([held((4, 0, 3), kept=[0, 1]), held((4, 2, 3), kept=[2])], 9, False),
        ([held((4, 0, 3), kept=[0, 1])], 0, False),
    ],
    ids=["shards", "a snapshot", "a snapshot that is older than the record", "no complete snapshot"],
)
def test_with_what_the_workers_continue(orphans: list[Holding], reached: int, attached: bool) -> None:
    """Workers that are of no use are ended, and no others are started yet."""
    group: Any = Orphans(*orphans)
    elastic = ElasticConfig(grow=False)
    engine = Engine(
        group, SingleWorkerBackend(), None, target=2, least=1, elastic=elastic, limits=LIMITS, sharded=SHARDED, term=2
    )
    assert engine.attach(trained=1, reached=Progress(step=reached)) is attached
    assert group.launched == 0
    assert len(group.dismissed) == (0 if attached else len(orphans))
    assert [each.reason for each in engine.recoveries] == ["takeover"] * attached

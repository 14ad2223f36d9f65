"""What the user reads if the workers start, but cannot form a process group."""

from typing import Any

import pytest

from raysgd.config import Limits
from raysgd.core.outcomes import Left, Ok
from raysgd.core.ranks import RankInfo
from raysgd.engine.generation import Generation
from raysgd.errors import WorkerStartError
from tests.fake_group import FakeGroup, Interrupted, SingleWorkerBackend, started


class Unconnected(FakeGroup):
    """Its workers start, each on a machine of its own."""

    def launch(self, count: int) -> list[str]:
        names = super().launch(count)
        self.events += [started(name, f"10.0.0.{number}") for number, name in enumerate(names, start=1)]
        return names


def test_the_error_names_the_cause_of_each_rank_with_its_address() -> None:
    limits = Limits.derive(timeout_s=10, hang_timeout_s=10, start_s=10)
    group = Unconnected(join=Interrupted(cause="timed out"))
    generation = Generation(group.table(), SingleWorkerBackend(), limits, factory=None, hook=None)
    with pytest.raises(WorkerStartError) as caught:
        generation.start(2, 2)
    assert "could not connect to each other (rank 0 on 10.0.0.1: timed out; rank 1 on 10.0.0.2: timed out)" in str(
        caught.value
    )


class Lossy(Unconnected):
    """Workers that a driver has left. What they need to be attached does not arrive at the first try."""

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        left = Left(RankInfo(world_rank=0, world_size=1, generation=3), -1, [])
        self.outcomes["attach"] = Ok(left) if "attach" in self.outcomes else Interrupted(cause="reset")
        return super().submit(worker, verb, arguments, generation=generation)


def test_a_worker_that_has_not_got_the_new_operator_gets_it_again() -> None:
    limits = Limits.derive(timeout_s=10, hang_timeout_s=10, start_s=10)
    group = Lossy()
    table = group.table()
    generation = Generation(table, SingleWorkerBackend(), limits, factory=None, hook=None)
    (left,) = generation.gather(table.launch(1))
    assert left.rank_info.generation == 3 and group.dismissed == []

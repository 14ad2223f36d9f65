"""What the user reads if the workers start, but cannot form a process group."""

from typing import Any

import pytest

from raysgd.config import Limits
from raysgd.core.outcomes import GpuFault, Ok, WorkerFailed
from raysgd.core.ranks import RankInfo
from raysgd.engine.generation import Generation
from raysgd.engine.takeover import gather
from raysgd.errors import ResourceError, WorkerStartError
from raysgd.workers.orphan import Left
from tests.engine.fake_group import FakeGroup, Interrupted, SingleWorkerBackend, started


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
    (left,) = gather(table, generation, table.launch(1))
    assert left.rank_info.generation == 3 and group.dismissed == []


class WithGpus(FakeGroup):
    """Gives each worker the first GPU that no other one holds. The set-up breaks GPU 0."""

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus)
        self.gpus, self.holders, self.set_up = gpus, dict[str, str](), list[str]()

    def launch(self, count: int) -> list[str]:
        names = super().launch(count)
        for name in names:
            gpu = next((each for each in map(str, range(self.gpus)) if each not in self.holders.values()), "")
            self.holders |= {name: gpu} if gpu else {}
            self.events += [started(name, "10.0.0.7", gpu=gpu)] if gpu else []
        return names

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        gpu = self.holders[worker]
        self.set_up += [gpu] if verb == "build" else []
        broken = WorkerFailed("CUDA error: ECC", "gpu failure", fault=GpuFault("GPU-5f1c"))
        self.outcomes["build"] = broken if gpu == "0" else Ok()
        return super().submit(worker, verb, arguments, generation=generation)

    def dismiss(self, worker: str) -> None:
        super().dismiss(worker)
        self.free += self.holders.pop(worker, None) is not None


@pytest.mark.parametrize(("gpus", "least", "members"), [(3, 2, ["1", "2"]), (2, 1, ["1"])])
def test_a_gpu_that_breaks_in_each_start_is_left_out(gpus: int, least: int, members: list[str]) -> None:
    limits = Limits.derive(timeout_s=10, hang_timeout_s=10, start_s=10)
    group = WithGpus(gpus)
    table = group.table()
    Generation(table, SingleWorkerBackend(), limits, factory=None, hook=None).start(2, least)
    assert [group.holders[worker] for worker in table.members()] == members
    assert group.set_up.count("0") == 2
    assert "0" in group.holders.values(), "a worker holds it, so that no other one gets it"


def test_if_every_gpu_is_broken_the_error_says_that_there_is_no_room() -> None:
    limits = Limits(start_s=0.5, setup_s=10, join_s=10, collective_s=10, hang_s=10)
    group = WithGpus(1)
    with pytest.raises(ResourceError, match="the cluster had no room for 1 of 1 worker"):
        Generation(group.table(), SingleWorkerBackend(), limits, factory=None, hook=None).start(1, 1)
    assert group.set_up == ["0", "0"]

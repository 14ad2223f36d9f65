"""What the user reads if the workers start, but cannot form a process group."""

import pytest

from raysgd.config import Limits
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

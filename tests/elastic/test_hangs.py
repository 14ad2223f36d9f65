"""A hang is reported with rank, phase and stack, and the rank that hangs is ended. test_function_faults.py has a stopped process."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig
from tests.faults import Fault, Ground, LedgerOperator

pytestmark = pytest.mark.elastic

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    elastic = ElasticConfig(hang_timeout_s=LIMIT_S, grow="epoch")
    ground = Ground(tmp_path_factory.mktemp("hangs"), num_workers=3, elastic=elastic)
    yield ground
    ground.trainer.shutdown()


@pytest.fixture
def ground(shared: Ground) -> Ground:
    shared.whole_again(3)
    shared.trained()
    return shared


@pytest.mark.parametrize(
    ("fault", "stack"),
    [
        (Fault(2, 5, "sleep"), "faults.py"),
        pytest.param(Fault(0, 5, "stop", "backward"), "answer", marks=pytest.mark.nightly),
        pytest.param(Fault(1, 5, "gil"), "does not answer", marks=pytest.mark.more),
    ],
    ids=["deadlock in user code", "stopped rank 0", "holds the interpreter lock"],
)
def test_the_rank_that_hangs_is_named_and_ended(ground: Ground, fault: Fault, stack: str, caplog: Any) -> None:
    ground.arm(fault)
    before = len(ground.trainer.recoveries)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        ground.trainer.train()
    assert time.monotonic() - started > LIMIT_S  # test_watchdog.py has the exact limits, in virtual time
    ground.assert_epoch_exact()
    hang = ground.trainer.recoveries[before]
    assert (hang.reason, hang.removed_ranks, hang.in_place) == ("hang", (fault.rank,), True)
    warning = next(r.getMessage() for r in caplog.records if ": killing rank" in r.getMessage())
    assert f"rank {fault.rank} on" in warning and "batch" in warning and stack in warning


class Deadlocked(LedgerOperator):
    """All ranks wait in a collective that never ends, because rank 1 waits in another one, once."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mark = Path(self.config["marks"]) / f"deadlock-{self.world_rank}"
        if self.global_step == 6 and self.world_size == 2 and not mark.exists():
            mark.touch()
            tensor = torch.zeros(1)
            if self.world_rank == 0:
                torch.distributed.recv(tensor, src=1)
            else:
                torch.distributed.recv(tensor, src=0)
        return super().train_batch(batch, batch_info)


def test_training_continues_after_a_deadlock_of_all_ranks(ray_cluster: None, tmp_path: Path) -> None:
    elastic = ElasticConfig(hang_timeout_s=LIMIT_S, grow=False)
    ground = Ground(tmp_path / "dead", operator=Deadlocked, num_workers=2, elastic=elastic)
    try:
        ground.trainer.train()
        ground.assert_epoch_exact()
        assert len(ground.trainer.recoveries) == 1
    finally:
        ground.trainer.shutdown()

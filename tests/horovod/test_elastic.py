"""With Horovod, workers fail, raise errors, leave and join: each sample is used once, and no worker starts again."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground, LedgerOperator

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.horovod]


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(
        tmp_path_factory.mktemp("horovod"),
        num_workers=3,
        backend="horovod",
        use_gpu=False,
        elastic=ElasticConfig(hang_timeout_s=60),
    )
    yield ground
    ground.trainer.shutdown()


@pytest.fixture
def ground(shared: Ground) -> Ground:
    shared.whole_again(3)
    shared.trained()
    return shared


def senders() -> int:
    """Return how many of Horovod's optimizers exist in this process."""
    gc.collect()
    return sum(hasattr(each, "_allreduce_delay") for each in gc.get_objects() if isinstance(each, _optimizer()))


def _optimizer() -> type:
    import torch

    return torch.optim.Optimizer


@pytest.mark.parametrize(("rank", "step", "where"), [(1, 7, "backward"), (0, 20, "after")])
def test_one_of_three_workers_fails(ground: Ground, rank: int, step: int, where: str) -> None:
    """A worker fails while the others are averaging gradients, and after it."""
    ground.arm(Fault(rank, step, "kill", where))
    before = len(ground.trainer.recoveries)
    result = ground.trainer.train()
    assert ground.fired() == 1
    ground.assert_epoch_exact()
    failure = ground.trainer.recoveries[before]
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("worker death", (rank,), True)
    assert (failure.world_size_before, failure.world_size_after, failure.batches_redone) == (3, 2, 0)
    assert result["num_samples"] == ground.samples


def test_a_worker_failure_during_a_recovery(ground: Ground) -> None:
    ground.arm(Fault(2, 4), Fault(1, 0, where="resized"))
    ground.trainer.train()
    assert ground.fired() == 2
    ground.assert_epoch_exact()


def test_an_error_on_one_rank_while_the_others_wait_for_its_gradients(ground: Ground) -> None:
    ground.arm(Fault(2, 5, "raise", "backward"))
    before = len(ground.trainer.recoveries)
    with pytest.raises(ZeroDivisionError, match="planned in raise") as caught:
        ground.trainer.train()
    assert caught.value.raysgd_rank == 2  # type: ignore[attr-defined]
    ground.trainer.train()
    ground.assert_epoch_exact()
    assert len(ground.trainer.recoveries) == before and ground.trainer.world_size == 3


def test_resizing_to_one_worker_and_back_in_the_middle_of_an_epoch(ground: Ground) -> None:
    trainer = ground.trainer
    trainer.train(num_steps=5)
    trainer.resize(1)
    trainer.train(num_steps=5)
    trainer.resize(3)
    trainer.train()
    ground.assert_epoch_exact()
    assert [recovery.reason for recovery in trainer.recoveries[-2:]] == ["shrink", "growth"]
    assert trainer.apply_all_workers(senders) == [1, 1, 1]


def test_a_replacement_worker_joins_in_the_middle_of_an_epoch(ground: Ground) -> None:
    ground.trainer.apply_all_operators(lambda operator: operator.config.update(pace=0.05))
    ground.arm(Fault(1, 3))
    before = len(ground.trainer.recoveries)
    deadline = time.monotonic() + 60
    while len(ground.trainer.recoveries) < before + 2 and time.monotonic() < deadline:
        ground.trainer.train()
        ground.assert_epoch_exact()
    failure, growth = ground.trainer.recoveries[before : before + 2]
    assert (failure.reason, growth.reason) == ("worker death", "growth")
    assert (growth.world_size_before, growth.world_size_after) == (2, 3)
    assert growth.in_place and growth.batches_redone == 0


class KeepsGraph(LedgerOperator):
    """Keeps its last loss, and so its graph, as the traceback of an error can do."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index, x, y = batch
        indices = self.gathered(index.tolist())
        self.loss = self.criterion(self.model(x.double()), y.double())
        self.zero_grad()
        self.backward(self.loss)
        self.step(self.optimizer)
        self.ledger.extend(indices)
        return {"train_loss": self.loss.detach(), "num_samples": len(index)}


def test_a_graph_of_an_earlier_generation_sends_nothing(ray_cluster: None, tmp_path: Path) -> None:
    elastic = ElasticConfig(grow=False)
    ground = Ground(tmp_path, operator=KeepsGraph, num_workers=3, backend="horovod", use_gpu=False, elastic=elastic)
    try:
        ground.trainer.train(num_steps=3)
        ground.trainer.resize(2)
        ground.trainer.train()
        ground.assert_epoch_exact()
    finally:
        ground.trainer.shutdown()


def test_a_stopped_process_is_detected_as_a_hang(ray_cluster: None, tmp_path: Path) -> None:
    elastic = ElasticConfig(hang_timeout_s=5, grow=False)
    ground = Ground(tmp_path / "stopped", num_workers=2, backend="horovod", use_gpu=False, elastic=elastic)
    try:
        ground.arm(Fault(1, 5, "stop", "backward"))
        ground.trainer.train()
        ground.assert_epoch_exact()
        (hang,) = ground.trainer.recoveries
        assert (hang.reason, hang.removed_ranks, hang.in_place, hang.batches_redone) == ("hang", (1,), True, 0)
    finally:
        ground.trainer.shutdown()

"""Two workers, one of which is made slow: the log and `trainer.speed` name it, and what it is slow in."""

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import Speed, TorchTrainer
from raysgd.core.measures import speed
from tests.torch.small import Line

SLEEP_S = 0.1  # much longer than what else a step takes, also on a busy machine


class Sleepy(Dataset[Any]):
    """Data whose reading takes long when `slow` is set."""

    slow = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLEEP_S / 2 if self.slow else 0.0)
        return torch.ones(2), torch.ones(1)


class SlowIn(Line):
    """Batches of two samples, and a model whose forward pass takes long when `slow` is set."""

    slow = False

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.data = Sleepy()
        self.register_data(train_loader=DataLoader(self.data, batch_size=2, shuffle=True))
        self.model.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S if self.slow else 0.0))


def made_slow(trainer: TorchTrainer, rank: int, *, data: bool, computing: bool) -> None:
    def make(operator: Any) -> None:
        operator.data.slow = data and operator.world_rank == rank
        operator.slow = computing and operator.world_rank == rank

    trainer.apply_all_operators(make)


def verdict(trainer: TorchTrainer, slow: tuple[int, ...], phase: str) -> Speed:
    """Train until this verdict is there."""
    for _ in range(60):
        trainer.train()
        if (trainer.speed.slow, trainer.speed.phase) == (slow, phase):
            return trainer.speed
    raise AssertionError(trainer.speed)


@pytest.mark.filterwarnings("ignore:.*reads self.world_rank")
def test_the_slow_rank_and_its_phase_are_named(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(speed, "WINDOWS", 4)
    monkeypatch.setattr(speed, "LEAST_S", 0.1)
    monkeypatch.setattr(speed, "WINDOW_BATCHES", 6)
    with TorchTrainer(training_operator_cls=SlowIn, num_workers=2, use_gpu=False) as trainer:
        assert trainer.speed == Speed()
        made_slow(trainer, 1, data=True, computing=False)
        found = verdict(trainer, (1,), "data")
        fast, slow = found.ranks
        assert slow.data_seconds > 0.8 * SLEEP_S > fast.data_seconds and fast.wait_seconds is not None
        assert fast.wait_seconds > 0.5 * SLEEP_S and fast.wait_seconds > (slow.wait_seconds or 0.0)
        assert slow.batch_seconds == pytest.approx(fast.batch_seconds, rel=0.3), "all ranks need as long for a step"
        made_slow(trainer, 0, data=False, computing=True)
        found = verdict(trainer, (0,), "computing")
        assert found.ranks[0].compute_seconds > 0.5 * SLEEP_S > found.ranks[0].data_seconds
    lines = [each.message for each in caplog.records if "of each second" in each.message]
    assert sum(f"rank 1 on {slow.node}" in each and "without data" in each for each in lines) == 1, lines
    assert sum(f"rank 0 on {slow.node}" in each and "for a batch" in each for each in lines) == 1, lines

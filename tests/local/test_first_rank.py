"""What belongs to rank 0 continues on its successor, or the log says why it does not."""

from typing import Any

import pytest

from raysgd import TorchTrainer
from raysgd.replica.operator_base import RANK_IN_SETUP
from tests.local.group import Cluster, Fault
from tests.torch.small import Line, inline


class Writes(Line):
    """Only the first rank writes."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.lines: list[int] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.point("begun")
        result = super().train_batch(batch, batch_info)
        if self.is_first:
            self.lines.append(batch_info["global_step"])
        return result


class ReadsRank(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.writer = [] if self.world_rank == 0 else None


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "setup reads" in each.getMessage()]


def test_another_rank_becomes_the_first(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault("kill", "begun", rank=0, step=3)
    with (
        Cluster([fault]),
        TorchTrainer(training_operator_cls=Writes, num_workers=2, use_gpu=False) as trainer,
    ):
        trainer.train(num_steps=5)
        found = trainer.apply_all_operators(lambda operator: operator.lines)[0]
        assert list(dict.fromkeys(found)) == [2, 3, 4], "a worker may have several parts"
    assert not messages(caplog)


def test_a_rank_that_setup_reads_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with inline(ReadsRank):
        assert not messages(caplog), "one worker is always the first"
    made = {"training_operator_cls": ReadsRank, "num_workers": 2, "use_gpu": False}
    with Cluster([Fault("kill", "applied", rank=1, step=2)]), TorchTrainer(**made) as trainer:  # type: ignore[arg-type]
        trainer.train()
        trainer.train()
    assert messages(caplog) == [RANK_IN_SETUP]

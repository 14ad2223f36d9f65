"""One of several processes runs out of memory: all of them repeat the step in smaller pieces, and the weights are the same."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.torch.simulated import train
from tests.torch.test_exact_gradients import Curve

pytestmark = [
    pytest.mark.elastic,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:the training loader does not shuffle"),
]
ROWS, BATCH = 50, 4


class Tight(Curve):
    """Runs out of memory on the rank `full` in the forward pass of the step `at` with more than two rows, or in the step `inside`
    while Adam changes the weights. A worker whose rank is `dies` is killed at the same time, in the backward pass."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (x, y), step, config = batch, batch_info["global_step"], self.config
        self.sizes = [*getattr(self, "sizes", []), len(x)]
        mine = self.world_rank == config["full"]
        if mine and step == config.get("at") and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.zero_grad()
        loss = self.criterion(self.model(x), y)
        if self.world_rank == config.get("dies") and step == config["at"] and not Path(config["mark"]).exists():
            Path(config["mark"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.backward(loss)
        if mine and step == config.get("inside") and not Path(config["mark"]).exists():
            Path(config["mark"]).touch()
            nn.init.ones_(self._parts.models[0][0].bias)
            hook = self.optimizer.register_step_pre_hook(lambda *_: self.fail(hook))
        self.step()
        return {"num_samples": len(x), "train_loss": loss.detach()}

    def fail(self, hook: Any) -> None:
        hook.remove()
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def run(
    config: dict[str, Any], workers: int, batch: Any = "per_worker"
) -> tuple[torch.Tensor, dict[str, Any], Any, Any]:
    with TorchTrainer(
        training_operator_cls=Tight,
        config={"rows": ROWS, "batch": BATCH, "adam": True, **config},
        num_workers=workers,
        use_gpu=False,
        scheduler_step_freq="batch",
        options=TrainingOptions(on_oom="halve", clip_norm=1.0),
        elastic=ElasticConfig(batch=batch, grow=False, snapshot_every=None),
    ) as trainer:
        result = trainer.train(max_retries=1)
        assert len({tuple(each) for each in trainer.apply_all_operators(lambda operator: operator.sizes[-2:])}) == 1
        vector = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
        sizes = trainer.apply_all_operators(lambda operator: operator.sizes)
        return vector, result, trainer.recoveries, sizes


def expected(workers: int) -> torch.Tensor:
    config = {"rows": ROWS, "batch": BATCH, "adam": True}
    return train(Curve, config, [(None, workers)], options=TrainingOptions(parallel="ddp", clip_norm=1.0))


def test_one_rank_runs_out_of_memory_in_a_forward_pass() -> None:
    vector, result, recoveries, sizes = run({"full": 1, "at": 2}, 2)
    torch.testing.assert_close(vector, expected(2), rtol=1e-9, atol=1e-9)
    assert (result["num_samples"], result["batch_count"]) == (ROWS, 7)
    assert [(each.reason, each.in_place, each.world_size_after) for each in recoveries] == [("out of memory", True, 2)]
    assert "no worker processes more than 2 samples at once (4 before)" in recoveries[0].detail
    assert sizes[0] == [4, 4, 4, *[2] * 8, 1] and sizes[1] == [4, 4, 4, *[2] * 8, 1]


def test_a_worker_is_killed_in_the_step_that_is_repeated(tmp_path: Path) -> None:
    config = {"full": 1, "at": 2, "dies": 2, "mark": str(tmp_path / "died")}
    vector, result, recoveries, _ = run(config, 3, "global")
    torch.testing.assert_close(vector, expected(3), rtol=1e-9, atol=1e-9)
    assert (result["num_samples"], result["batch_count"]) == (ROWS, 5)
    assert recoveries[-1].world_size_after == 2


def test_in_the_step_of_an_optimizer_the_rank_takes_the_state_of_another(tmp_path: Path) -> None:
    vector, result, recoveries, _ = run({"full": 1, "inside": 3, "mark": str(tmp_path / "failed")}, 2)
    torch.testing.assert_close(vector, expected(2), rtol=1e-9, atol=1e-9)
    assert (result["num_samples"], result["batch_count"]) == (ROWS, 7)
    assert [each.reason for each in recoveries] == ["out of memory"]

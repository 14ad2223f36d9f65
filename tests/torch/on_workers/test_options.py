"""Accumulation, compiled models and DDP's hooks on two workers, also if one of them is killed."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.torch.test_accumulate import Deep

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Net(Deep):
    """Counts, without a hook, the all-reduces. It is killed once, in the step that the config names."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"rows": 44, **config})
        self.reduces = 0
        if config.get("count"):
            self.model.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):  # DDP checks annotations, and accepts only its own
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.reduces += 1
        return allreduce_hook(None, bucket)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        mark = self.config.get("mark")
        if mark and self.world_rank == 1 and batch_info["global_step"] == 5 and not os.path.exists(mark):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def trained(config: dict[str, Any], **arguments: Any) -> tuple[torch.Tensor, Any, TorchTrainer]:
    """Train two epochs. Return the weights, the last result, and the trainer, which is shut down."""
    with TorchTrainer(training_operator_cls=Net, config=config, use_gpu=False, **arguments) as trainer:
        trainer.train()
        result = trainer.train()
        seen = trainer.apply_all_operators(what_is_there)
        return nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach(), (result, seen), trainer


def what_is_there(operator: Any) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    log = getattr(operator.model, "_get_ddp_logging_data", dict)()
    counts = {"steps": operator.steps, "reduces": operator.reduces}
    return {**counts, "graphs": counters["stats"]["unique_graphs"], "hook": log.get("comm_hook")}


class Collected(Net):
    """Returns how many objects the garbage collector finds after each call of `train`, which runs without it."""

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        gc.disable()
        try:
            result = super().train_epoch(iterator, info)
            return {**result, "garbage": gc.collect()}
        finally:
            gc.enable()


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Return the weights of one worker in this process. Each of its batches has the samples of two workers' windows."""
    return trained({"batch": 16})[0]


def test_one_all_reduce_for_each_window(expected: torch.Tensor) -> None:
    ours, (result, seen), _ = trained({"batch": 2, "count": True}, num_workers=2, options=TrainingOptions(accumulate=4))
    assert torch.allclose(ours, expected, atol=1e-6)
    assert [each["steps"] for each in seen] == [6, 6]  # 44 samples in windows of 16, two epochs
    assert [each["reduces"] for each in seen] == [6, 6]
    assert (result["batch_count"], result["num_samples"]) == (11, 44)


@pytest.mark.more
@pytest.mark.elastic
def test_a_failure_in_a_window_repeats_it_without_compiling_again(expected: torch.Tensor, tmp_path: Path) -> None:
    ours, (_, seen), trainer = trained(
        {"batch": 2, "mark": str(tmp_path / "died")},
        num_workers=2,
        options=TrainingOptions(accumulate=4, compile={"backend": "aot_eager", "dynamic": True}),
        elastic=ElasticConfig(grow=False),
    )
    assert [failure.in_place for failure in trainer.recoveries] == [True]
    assert torch.allclose(ours, expected, atol=1e-5), (ours - expected).abs().max()
    assert len(seen) == 1 and seen[0]["steps"] == 6
    assert seen[0]["graphs"] == 1  # for any batch size, before the failure and after it


HOOKS: list[tuple[Any, str, float]] = [
    ("fp16", "fp16_compress_hook", 0.01),
    ({"name": "powersgd", "matrix_approximation_rank": 8, "start_powerSGD_iter": 2}, "powerSGD_hook", 0.3),
]


@pytest.mark.elastic
@pytest.mark.parametrize(("hook", "name", "close"), [HOOKS[0], pytest.param(*HOOKS[1], marks=pytest.mark.more)])
def test_communication_hooks_are_registered_again_after_a_failure(
    hook: Any, name: str, close: float, expected: torch.Tensor, tmp_path: Path
) -> None:
    ours, (_, seen), trainer = trained(
        {"batch": 8, "mark": str(tmp_path / "died")},
        num_workers=2,
        options=TrainingOptions(comm_hook=hook),
        elastic=ElasticConfig(grow=False),
    )
    assert len(trainer.recoveries) == 1
    assert [each["hook"] for each in seen] == [name]
    assert torch.allclose(ours, expected, atol=close), (ours - expected).abs().max()
    assert not torch.equal(ours, expected)


def test_steps_leave_nothing_to_the_garbage_collector() -> None:
    """In a worker of Ray a full collection takes more than 0.1 s, as long as hundreds of small steps."""
    with TorchTrainer(training_operator_cls=Collected, config={"batch": 1}, num_workers=2, use_gpu=False) as trainer:
        trainer.train(num_steps=2)
        few, many = trainer.train(num_steps=2), trainer.train(num_steps=20)
    assert many["garbage"] - few["garbage"] < 18  # less than one object for each further step

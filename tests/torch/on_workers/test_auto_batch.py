"""`ElasticConfig(batch="auto")` in real processes, with DistributedDataParallel: the README's digits, BatchNorm, and losses that compare
the samples of all workers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysgd import ConfigError, ElasticConfig, TorchTrainer
from tests.torch.test_auto_batch import Normed
from tests.torch.test_exact_gradients import Curve, close

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def digits() -> Any:
    """Return the operator of the README's first example."""
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("\n\n\nwith TorchTrainer(")[0]
    names: dict[str, Any] = {"__name__": "digits"}
    exec(code, names)
    return names["Digits"]


def dying(kind: Any, workers: int = 2) -> Any:
    """Return a class whose last rank kills itself in step 3, if `info` asks for it."""

    class Dying(kind):  # type: ignore[misc, valid-type]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info.get("dies") and batch_info["global_step"] == 3 and self.world_rank == workers - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_batch(batch, batch_info)

    return Dying


Found = tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]


def without_and_with_a_death(
    kind: Any, *, workers: int = 2, validates: bool = False, **given: Any
) -> tuple[Found, Found, str | None]:
    """Train from the same state without and with the death of a worker. Return the weights, buffers and results of a validation of
    both, and the batch mode."""
    found: list[Found] = []
    elastic = ElasticConfig(grow=False)
    with TorchTrainer(
        training_operator_cls=dying(kind, workers), num_workers=workers, use_gpu=False, elastic=elastic, **given
    ) as trainer:
        begin = trainer.state_dict()
        for dies in (False, True):
            trainer.load_state_dict(begin)
            trainer.train(info={"dies": dies})
            trainer.train()
            assert trainer.world_size == workers - dies
            model = trainer.get_model()
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            found.append((weights, [*model.buffers()], trainer.validate() if validates else {}))
        return found[0], found[1], trainer.batch_mode


ARGUMENTS: dict[str, Any] = {"config": {"rows": 40, "batch": 4}, "scheduler_step_freq": "batch"}


class Centered(Curve):
    """Computes with its buffer, as spectral normalization does: DistributedDataParallel sends that of rank 0 before each step."""

    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(5).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centered = x - self.mean
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.2)
            return centered

    def register(self, *, models: Any, **parts: Any) -> Any:
        models.insert(1, self.Center())
        return super().register(models=models, **parts)


@pytest.mark.parametrize("kind", [Curve, Normed, Centered])
def test_a_worker_that_is_not_replaced_changes_nothing(kind: type[Curve]) -> None:
    (expected, others, _), (mine, buffers, _), mode = without_and_with_a_death(kind, **ARGUMENTS)
    close(mine, expected)
    for one, other in zip(buffers, others, strict=True):
        close(one, other)
    assert mode == "parts"


def test_the_digits_of_the_readme() -> None:
    pytest.importorskip("sklearn")
    whole, reduced, mode = without_and_with_a_death(digits(), validates=True, config={"lr": 0.1}, seed=3)
    assert mode == "parts"
    torch.testing.assert_close(reduced[0], whole[0], rtol=1e-4, atol=1e-5)
    assert reduced[2]["val_loss"] == pytest.approx(whole[2]["val_loss"], rel=1e-4)
    assert reduced[2]["val_accuracy"] == pytest.approx(whole[2]["val_accuracy"], rel=1e-6)


class Contrasting(Curve):
    """Its loss compares the samples of all workers."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        output = self.model(batch[0])
        if dist.is_initialized():
            dist.all_reduce(output.detach().mean())
        self.zero_grad()
        self.backward(self.criterion(output, batch[1]))
        self.step()
        return {"num_samples": len(batch[0])}


class LaterContrasting(Curve):
    """Begins to compare them when the first worker fails."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mean = self.model(batch[0]).detach().mean()
        if dist.is_initialized() and batch_info["global_step"] >= 3:
            dist.all_reduce(mean)
        return super().train_batch(batch, batch_info)


class Measured(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if dist.is_initialized():
            dist.all_reduce(result["train_loss"])
        return result


class Together(Curve):
    """Its model subtracts the mean over all workers, as SyncBatchNorm does, and its buffer is exchanged by DDP itself."""

    class Center(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.detach().mean(0)
            if dist.is_initialized():
                dist.all_reduce(mean)
            return super().forward(x - mean / 2)

    def register(self, *, models: Any, **parts: Any) -> Any:
        models.append(self.Center(1).double())
        return super().register(models=models, **parts)


@pytest.mark.parametrize(
    ("kind", "workers", "mode"),
    [
        (Contrasting, 2, "per_worker"),
        (Together, 2, "per_worker"),
        (Measured, 2, "parts"),
    ],
)
def test_what_other_workers_change_is_per_worker(kind: type[Curve], workers: int, mode: str) -> None:
    assert without_and_with_a_death(kind, workers=workers, **ARGUMENTS)[2] == mode


def test_what_other_workers_change_later_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)collective calls before the backward pass.*first step.*undone"):
        without_and_with_a_death(LaterContrasting, workers=3, **ARGUMENTS)


class AccumulatingByHand(Curve):
    """Makes a step in every second batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (self.criterion(self.model(batch[0]), batch[1]) / 2).backward()
        if batch_info["batch_idx"] % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {}


def test_accumulation_by_hand_is_sent_to_the_option() -> None:
    given = {**ARGUMENTS, "parts": 2, "use_gpu": False}
    with (
        TorchTrainer(training_operator_cls=AccumulatingByHand, num_workers=2, **given) as trainer,
        pytest.raises(ConfigError, match=r"makes no step with the helpers.*TrainingOptions\(accumulate=n\)"),
    ):
        trainer.train()

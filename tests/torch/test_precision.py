"""Precisions on the CPU: training works in each of them, also in custom loops."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TrainingOptions
from raysgd.replica.steps.step import Drawn, Step
from raysgd.torch.step.precision import Fp16, make_precision
from tests.peek import options_of
from tests.torch.small import Line, inline, operator_of, rows, set_scale, weights

FORMATS: list[dict[str, Any]] = [
    {"options": TrainingOptions(precision="fp32")},
    {"options": TrainingOptions(precision="bf16")},
    {"use_fp16": True},
]


class Watching(Line):
    """Records the type in which its model computes."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        with self.autocast():
            self.kind = self.model(batch[0]).dtype
        return result


@pytest.mark.parametrize("use_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
@pytest.mark.parametrize("arguments", FORMATS)
def test_each_precision_learns(arguments: dict[str, Any], use_gpu: bool) -> None:
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    with inline(Line, use_gpu=use_gpu) as full:
        expected = [full.train()["train_loss"] for _ in range(12)]
    with inline(Watching, use_gpu=use_gpu, **arguments) as trainer:
        set_scale(trainer, 16.0)
        losses = [trainer.train()["train_loss"] for _ in range(12)]
        assert losses == pytest.approx(expected, rel=0.05, abs=0.001)
        assert losses[-1] < 0.1 * losses[0], losses
        assert operator_of(trainer).kind == kinds.get(options_of(operator_of(trainer)).precision, torch.float16)
        assert trainer.validate()["val_loss"] < 0.1 * losses[0]
        assert weights(trainer).dtype == torch.float32


@pytest.mark.parametrize(("arguments", "native"), [({}, False), ({"use_fp16": True}, True)])
def test_the_operator_knows_its_precision(arguments: dict[str, Any], native: bool) -> None:
    with inline(**arguments) as trainer:
        operator = operator_of(trainer)
        assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == (native, native, False)
        assert (operator._amp_scaler is not None) == native


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="an apex is installed")
def test_a_missing_apex_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r"needs NVIDIA Apex.*use precision='fp16'"):
        inline(use_fp16="apex")


def calm(precision: Any) -> Any:
    """Set a scale at which these few steps skip none."""
    if precision.state() is not None:
        precision.load({**precision.state(), "scale": 16.0})
    return precision


def two_optimizers(precision: str, steps: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Batches in which several optimizers step, some of them twice. The results are compared with full precision."""
    torch.manual_seed(0)
    number = calm(make_precision(precision, torch.device("cpu")))
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for batch in steps:
        for index in batch:
            optimizers[index].zero_grad()
            with number.autocast():
                loss = (models[index](torch.ones(4, 2)) - 1).pow(2).mean()
            number.backward(loss, optimizers[index])
            for _ in range(2):
                number.unscale(optimizers[index])
            nn.utils.clip_grad_norm_(models[index].parameters(), 0.5)
            number.step(optimizers[index])
        number.end_step(Step())
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]


@pytest.mark.parametrize("steps", [[(0, 1)] * 3, [(0, 0, 1)] * 2, [(0,), (1,), ()]])
def test_several_optimizers_share_one_scale(steps: list[tuple[int, ...]]) -> None:
    for full, half in zip(two_optimizers("fp32", steps), two_optimizers("fp16", steps), strict=True):
        assert torch.allclose(full, half, atol=5e-3)


def test_a_step_that_overflows_changes_no_later_step_of_its_batch() -> None:
    precision = calm(Fp16(torch.device("cpu")))
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for gradient in (math.inf, None):
        precision.backward(model(torch.ones(1, 1)).sum())
        if gradient is not None:
            model.weight.grad.fill_(gradient)
        precision.unscale(optimizer)
        precision.step(optimizer)
        optimizer.zero_grad()
    assert model.weight.item() == -1.0 and precision.scaler.get_scale() == 16.0
    precision.update()
    assert precision.scaler.get_scale() == 8.0


def test_what_user_code_has_unscaled_is_not_unscaled_again() -> None:
    precision = calm(Fp16(torch.device("cpu")))
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        precision.backward(model(torch.ones(1, 1)).sum())
        precision.scaler.unscale_(optimizer)
        precision.unscale(optimizer)
        assert model.weight.grad.item() == 1.0
        precision.step(optimizer)
        optimizer.zero_grad()
        precision.update()


def test_an_interrupted_batch_does_not_change_the_scaler() -> None:
    precision = calm(Fp16(torch.device("cpu")))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(torch.ones(1, 1)).sum())
    precision.unscale(optimizer)
    precision.put_back(Step(Drawn(None, 0)), None)
    assert precision.scaler.get_scale() == 16.0
    optimizer.zero_grad()
    precision.backward(model(torch.ones(1, 1)).sum())
    precision.unscale(optimizer)
    assert model.weight.grad is not None
    assert float(model.weight.grad) == pytest.approx(1.0, abs=1e-3)
    precision.step(optimizer)
    precision.end_step(Step())


@pytest.mark.parametrize("after", [False, True])
def test_steps_without_a_batch_make_the_scale_smaller_too(after: bool) -> None:
    class Own(Line):
        def train_epoch(self, iterator: Any, info: Any) -> Any:
            batches = list(iterator) if after else []
            x, y = rows()
            made = 0
            for _ in range(30):
                with self.autocast():
                    loss = 1000 * self.criterion(self.model(x).float(), y)
                self.zero_grad()
                self.backward(loss)
                made += self.step()
            return {"made": made, "batches": len(batches)}

    with inline(Own, config={"lr": 1e-5}, options=TrainingOptions(precision="fp16")) as trainer:
        before = weights(trainer)
        result = trainer.train()
        assert result["batches"] == 3 * after
        assert 0 < result["skipped_steps"] == 30 - result["made"] < 20
        assert not torch.equal(weights(trainer), before)

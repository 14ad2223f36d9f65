"""What Apex is asked, in which order and with what, against a double that writes it down: NVIDIA has removed `amp` from Apex."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TrainingOptions
from tests.local.test_hands_off import Own, assert_as_made
from tests.recorded import forget
from tests.torch.small import Line, inline, operator_of, weights


class Double(ModuleType):
    """apex.amp, as far as its documentation promises: scales losses by 8, and takes that back on the way out."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        self.events: list[tuple[Any, ...]] = []
        self.scale = 8.0

    def initialize(self, models: Any, optimizers: Any, **given: Any) -> Any:
        self.events.append(("initialize", len(models), len(optimizers), given))
        self.optimizers = optimizers
        return models, optimizers

    @contextlib.contextmanager
    def scale_loss(self, loss: Any, optimizers: Any, loss_id: int = 0) -> Iterator[Any]:
        numbers = [
            self.optimizers.index(each) for each in (optimizers if isinstance(optimizers, list) else [optimizers])
        ]
        self.events.append(("scale", numbers, loss_id))
        parameters = [each for number in numbers for each in self.master_params(self.optimizers[number])]
        before = [None if each.grad is None else each.grad.clone() for each in parameters]
        yield loss * self.scale
        for parameter, old in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                new = parameter.grad if old is None else parameter.grad - old
                parameter.grad = new / self.scale + (0 if old is None else old)
        self.events.append(("unscaled", numbers))

    def master_params(self, optimizer: Any) -> Iterator[Any]:
        return (each for group in optimizer.param_groups for each in group["params"])

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": 3}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events.append(("load", state))


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> Double:
    package, double = ModuleType("apex"), Double()
    package.amp = double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.amp", double)
    return double


class Registers(Line):
    """Passes apex_args on, and notes in the double when an optimizer steps."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        model, optimizer = nn.Linear(2, 1), self.optimizer
        model.load_state_dict(self.model.state_dict())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        apex_args = {"opt_level": "O1", "verbosity": 0}
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), apex_args=apex_args
        )
        events = sys.modules["apex.amp"].events
        events[:] = events[-1:]
        self.optimizer.register_step_post_hook(lambda *_: events.append(("step",)))


def test_one_model(amp: Double) -> None:
    with inline(Registers, use_fp16="apex") as trainer:
        operator = operator_of(trainer)
        assert (operator.use_fp16_apex, operator.use_fp16_native, operator._amp) == (True, False, amp)
        trainer.train(num_steps=2)
        ours = weights(trainer)
    assert amp.events[0] == ("initialize", 1, 1, {"opt_level": "O1", "verbosity": 0})
    assert amp.events[1:] == [("scale", [0], 0), ("unscaled", [0]), ("step",)] * 2
    with inline(Line) as plain:
        plain.train(num_steps=2)
        assert torch.allclose(ours, weights(plain), atol=1e-6)


def test_clipping_looks_at_the_master_weights_after_they_are_unscaled(amp: Double) -> None:
    with inline(Registers, options=TrainingOptions(precision="apex", clip_norm=0.1, accumulate=2)) as trainer:
        trainer.train(num_steps=2)
        ours = weights(trainer)
    assert [event[0] for event in amp.events[1:]] == ["scale", "unscaled", "scale", "unscaled", "step"]
    with inline(Line, options=TrainingOptions(clip_norm=0.1, accumulate=2)) as plain:
        plain.train(num_steps=2)
        assert torch.allclose(ours, weights(plain), atol=1e-6)


def test_state_travels_with_checkpoints(amp: Double, tmp_path: Any) -> None:
    with inline(Registers, options=TrainingOptions(precision="apex")) as trainer:
        trainer.save(tmp_path / "saved.pt")
        assert trainer.state_dict()["amp_apex"] == amp.state_dict()
        trainer.load(tmp_path / "saved.pt")
    assert ("load", amp.state_dict()) in amp.events


class Pair(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.pair, self.steppers = self.register(
            models=models, optimizers=optimizers, apex_args={"opt_level": "O1", "num_losses": 3}
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.zero_grad()
        first, second = (self.criterion(model(x), y) for model in self.pair)
        self.backward(first, self.steppers[0], loss_id=0)
        self.backward(second, self.steppers[1], loss_id=1)
        self.backward(sum(model(x).mean() for model in self.pair), loss_id=2)
        for optimizer in self.steppers:
            self.step(optimizer)
        return {}


def test_several_models_optimizers_and_losses(amp: Double) -> None:
    with inline(Pair, options=TrainingOptions(precision="apex")) as trainer:
        trainer.train(num_steps=1)
    assert amp.events[1] == ("initialize", 2, 2, {"opt_level": "O1", "num_losses": 3})
    assert [e for e in amp.events if e[0] == "scale"] == [("scale", [0], 0), ("scale", [1], 1), ("scale", [0, 1], 2)]


def test_an_apex_without_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("apex")
    package.__dict__.update(__path__=[])
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.delitem(sys.modules, "apex.amp", raising=False)
    with pytest.raises(ImportError, match=r"cannot be used \(No module named 'apex.amp'\).*without amp.*2025"):
        inline(use_fp16="apex")


def test_what_else_is_called_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex.py").write_text("from pyramid.session import something")  # as the package on PyPI begins
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    with pytest.raises(ImportError, match=r"cannot be used \(No module named 'pyramid'\).*other package"):
        inline(use_fp16="apex")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_is_written_to_the_users_objects(amp: Double, accumulate: int, tmp_path: Path) -> None:
    """By raysgd. Apex itself replaces methods of optimizers and models."""
    forget()
    options = TrainingOptions(precision="apex", accumulate=accumulate, clip_norm=0.1)
    with inline(Own, options=options, scheduler_step_freq="batch") as trainer:
        trainer.train()
        trainer.validate()
        trainer.save(tmp_path / "saved.pt")
        trainer.load(tmp_path / "saved.pt")
        trainer.train(num_steps=3)
        assert_as_made(trainer)
    forget()

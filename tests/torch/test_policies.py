"""A policy takes part in each step, and sees how it ends, without a change in the feed, the helpers or the replica."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from tests.local.runs import train
from tests.peek import add_policy, parts_of
from tests.torch.small import Line, inline, weights
from tests.torch.test_exact_gradients import Curve, close

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "structure.md"
Added = Callable[[Callable[[Any], Policy]], None]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Added:
    return partial(add_policy, monkeypatch)


class ByHand(Line):
    """Centralizes the gradients itself."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        for each in self.model.parameters():
            if each.dim() > 1:
                each.grad -= each.grad.mean(dim=1, keepdim=True)
        self.optimizer.step()
        return {}


class ByThePolicy(ByHand):
    train_batch = Line.train_batch


def policy_of_the_page() -> Any:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    found: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Centralize" in block), found)
    return found["Centralize"]


def test_the_policy_of_the_page_acts_once_in_each_step(added: Added) -> None:
    with inline(ByHand, config={"batch": 4}) as trainer:
        trainer.train()
        expected = weights(trainer)
    policy = policy_of_the_page()
    added(lambda operator: policy(parts_of(operator)))
    with inline(ByThePolicy, config={"batch": 4}) as trainer:
        trainer.train()
        assert torch.equal(weights(trainer), expected)
    with inline(ByThePolicy, config={"batch": 2}, options=TrainingOptions(accumulate=2)) as trainer:
        trainer.train()
        torch.testing.assert_close(weights(trainer), expected)
    with inline(ByHand) as trainer, pytest.raises(ConfigError, match=r"centralize=True acts in self\.step\(\)"):
        trainer.train()


def test_the_policy_of_the_page_does_the_same_for_any_number_of_workers(added: Added) -> None:
    policy = policy_of_the_page()
    added(lambda operator: policy(parts_of(operator)))
    whole = train(Curve, {"rows": 23, "batch": 6}, [(None, 1)])
    close(train(Curve, {"rows": 23, "batch": 2}, [(2, 3), (1, 1), (None, 2)], num_workers=3, batch="auto"), whole)


class Watching(Policy):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_loop(self, feed: Any) -> None:
        self.calls.append("epoch")

    def begin_part(self, step: Step) -> None:
        self.calls.append((step.place, step.closing))

    def end_step(self, step: Step) -> None:
        assert step.committed == (step.outcome != "undone")
        self.calls.append(step.outcome)

    def reset(self) -> None:
        self.calls.append("rest")


class Spoilt(Line):
    """Has a batch whose gradients are not finite, and one with an error."""

    spoilt = broken = -1

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        x = torch.ones(5, 2)
        return {"train_loader": DataLoader(TensorDataset(x, torch.ones(5, 1)), batch_size=1)}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["batch_idx"] == self.broken:
            raise LookupError("broken")
        factor = torch.nan if batch_info["batch_idx"] == self.spoilt else 1.0
        return super().train_batch((batch[0] * factor, batch[1]), batch_info)


BATCH = (0, True)
WINDOW = [(0, False), (1, True)]
CASES: dict[str, tuple[dict[str, Any], dict[str, int], list[Any]]] = {
    "usual": ({}, {}, [BATCH, "applied"] * 5),
    "skipped": ({"on_nonfinite": "skip"}, {"spoilt": 1}, [BATCH, "applied", BATCH, "skipped", *[BATCH, "applied"] * 3]),
    "an error": ({}, {"broken": 2}, [*[BATCH, "applied"] * 2, BATCH, "undone"]),
    "windows": ({"accumulate": 2}, {}, [*[*WINDOW, "applied"] * 2, BATCH, "applied"]),
    "an error in a window": ({"accumulate": 2}, {"broken": 3}, [*WINDOW, "applied", *WINDOW, "undone"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_policy_sees_each_batch_and_how_each_step_ends(case: str, added: Added) -> None:
    options, changed, expected = CASES[case]
    policy = Watching()
    added(lambda operator: policy)
    kind = type("Changed", (Spoilt,), changed)
    with inline(kind, options=TrainingOptions(**options)) as trainer:
        if "broken" in changed:
            with pytest.raises(LookupError, match="broken"):
                trainer.train()
        else:
            trainer.train()
    assert policy.calls == ["epoch", *expected, "rest"]


class Wraps(Line):
    """Gives the default loop an iterator of its own, and ends it in the middle of a window."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        return super().train_epoch((batch for _, batch in zip(range(3), iterator, strict=False)), info)


def test_a_loop_that_ends_early_leaves_a_window_undone(added: Added) -> None:
    policy = Watching()
    added(lambda operator: policy)
    with inline(Wraps, config={"rows": 12, "batch": 2}, options=TrainingOptions(accumulate=2)) as trainer:
        assert trainer.train()["num_samples"] == 4
    assert policy.calls == ["epoch", *WINDOW, "applied", (0, False), "undone", "rest"]

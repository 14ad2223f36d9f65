"""All ranks have the buffers of rank 0 after each step."""

from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer, TrainingOptions
from tests.local.group import Cluster
from tests.local.runs import train
from tests.peek import models_of
from tests.torch.test_exact_gradients import Curve

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")


class Normal(nn.Module):
    """Holds a BatchNorm layer, and two layers that are trained for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("large", torch.zeros(1 << 12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int16), persistent=False)


class Norms(Curve):
    """Makes two steps with gradients of one forward pass. `direct` is whether it does so without helpers."""

    direct = False

    def register(self, *, models: Any, **parts: Any) -> Any:
        torch.manual_seed(3)
        model = Normal().double()
        first = torch.optim.SGD(model.one.parameters(), lr=0.1)
        second = torch.optim.SGD([*model.norm.parameters(), *model.other.parameters()], lr=0.1)
        parts |= {"optimizers": [first, second], "schedulers": torch.optim.lr_scheduler.ExponentialLR(first, 0.9)}
        model, self.both, *rest = super().register(models=model, **parts)
        return model, first, *rest

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        model = self.unwrapped()
        model.calls += 1 + self.world_rank
        normal = model.norm(x)
        for layer, optimizer, features in zip(
            [model.one, model.other], self.both, [normal.detach(), normal], strict=True
        ):
            optimizer.zero_grad()
            loss = self.criterion(layer(features), y)
            loss.backward() if self.direct else self.backward(loss)
            optimizer.step() if self.direct else self.step(optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(x)}


def buffers(operator: Any) -> list[torch.Tensor]:
    return list(models_of(operator)[0].buffers())


def differing(kind: type[Curve], **given: Any) -> int:
    """Train in calls of one step. Return in how many buffers ranks have differed after them."""
    found: list[int] = []

    def look(trainer: Any, results: Any) -> None:
        first, *others = trainer.apply_all_operators(buffers)
        found.append(sum(any(not torch.equal(mine, each[n]) for each in others) for n, mine in enumerate(first)))

    train(kind, {"rows": 40, "batch": 4}, [(1, 3), (1, 3), (1, 2), (None, 2)], look=look, **given)
    assert len(found) == 4 and len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize("batch", ["per_worker", "auto"])
@pytest.mark.parametrize("direct", [False, True])
def test_all_ranks_have_those_of_rank_0(direct: bool, batch: str) -> None:
    """Also if a backward pass after a step refers to them."""
    assert differing(type("Kind", (Norms,), {"direct": direct}), batch=batch) == 0


class OwnData(Norms):
    """Makes its batches itself, after those of the iterator."""

    def train_epoch(self, iterator: Any, info: Any = None) -> dict[str, Any]:
        for _ in iterator:
            pass
        for number in range(3):
            x = torch.full((2, 3), number + self.world_rank).double() + torch.eye(2, 3)
            self.train_batch((x, torch.zeros(2, 1).double()), {})
        return {}


def test_all_ranks_have_those_of_rank_0_with_data_of_an_own_loop() -> None:
    with (
        Cluster(),
        TorchTrainer(
            training_operator_cls=OwnData,
            num_workers=2,
            use_gpu=False,
            scheduler_step_freq="epoch",
            config={"rows": 8, "batch": 4},
        ) as run,
    ):
        run.train()
        first, other = run.apply_all_operators(buffers)
    assert all(map(torch.equal, first, other)) and any(each.any() for each in first)


class Centered(nn.Module):
    """Reads a buffer that each forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.register_buffer("center", torch.zeros(1).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        found = (out - self.center).tanh()
        if self.training:
            self.center.lerp_(out.detach().mean(0), 0.3)
        return found


class Centering(Curve):
    def register(self, *, models: Any, **parts: Any) -> Any:
        torch.manual_seed(3)
        model = Centered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return super().register(models=model, **parts | {"optimizers": optimizer, "schedulers": scheduler})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_part_of_a_window_begins_with_its_own(accumulate: int) -> None:
    given: dict[str, Any] = {"num_workers": 2, "batch": "auto", "options": TrainingOptions(accumulate=accumulate)}
    one, two = (train(Centering, {"rows": 32, "batch": 2}, [(2, 2), (4, left)], **given) for left in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_without_ddps_sending_each_rank_has_its_own_buffers() -> None:
    class Own(Norms):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._registered.keep_parameters()
            self._registered.ddp_args = {"broadcast_buffers": False}

    assert differing(Own) == 3, "the running mean and variance, and the own number"


def test_large_buffers_that_do_not_change_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original = Cluster._broadcast

    def broadcast(self: Cluster, tensor: torch.Tensor, *given: Any, **named: Any) -> None:
        sent.append(tensor.nbytes)
        original(self, tensor, *given, **named)

    monkeypatch.setattr(Cluster, "_broadcast", broadcast)
    train(Norms, {"rows": 24, "batch": 4}, [(None, 2)])
    assert sent.count(32 + 32 + 16 + 16) == 2 * 5, "by two ranks, before each step of an optimizer but the first one"


class Bank(nn.Module):
    """Writes a large buffer from a forward pass on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layer, self.first, self.passes = nn.Linear(3, 1).double(), first, 0
        self.register_buffer("bank", torch.zeros(1 << 12).double())
        self.register_buffer("fixed", torch.zeros(1 << 12).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.training and self.passes >= self.first:
            self.bank.copy_(x.detach().mean().expand_as(self.bank))
        return self.layer(x)  # type: ignore[no-any-return]


class Banking(Curve):
    def register(self, *, models: Any, **parts: Any) -> Any:
        torch.manual_seed(3)
        model = Bank(self.config["first"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return super().register(models=model, **parts | {"optimizers": optimizer, "schedulers": scheduler})


@pytest.mark.parametrize(
    ("first", "equal"), [(1, [True] * 3), (4, [True] * 3), (3, [False, True, True]), (5, [True, False, True])]
)
def test_a_large_buffer_that_is_written_later_is_sent_from_the_next_loop_on(first: int, equal: list[bool]) -> None:
    """A loop has three steps; the ranks differ for the rest of one in whose middle it is written first."""
    found: list[bool] = []
    config = {"rows": 72, "batch": 4, "first": first}

    def look(trainer: Any, results: Any) -> None:
        [(bank, fixed), (other, _)] = trainer.apply_all_operators(buffers)
        found.append(torch.equal(bank, other))
        assert not fixed.any()

    train(Banking, config, [(3, 2)] * 3, look=look)
    assert found == equal

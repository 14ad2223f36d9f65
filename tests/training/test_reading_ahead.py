"""While the ranks exchange gradients, each reads its next batch: in the same order, with the same random numbers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset

from raysgd import TorchTrainer, TrainingOptions
from raysgd.core.control import Control
from raysgd.core.ranks import RankInfo
from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Drawn
from tests.torch.small import Line, inline, weights

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
on_workers = pytest.mark.usefixtures("ray_cluster")
SAMPLES, BATCH, PATIENCE_S = 24, 3, 120.0  # four batches for each of two workers


class Noisy(Dataset[Any]):
    """Reading a sample draws random numbers, and is noted. The file `first` is there when rank 0 has read its second batch."""

    broken: int | None = None

    def __init__(self, events: list[str], first: Path | None) -> None:
        self.events, self.first = events, first

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.broken:
            raise LookupError(f"sample {index} is damaged")
        if self.events[-1:] != ["read"]:
            self.events.append("read")
            if self.first is not None and self.events.count("read") == 2:
                self.first.touch()
        assert torch.is_grad_enabled()
        x = torch.tensor([float(index), 1.0]) + torch.rand(2)
        return x, x.sum().view(1)


class Watched(nn.Module):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.layer, self.dropout, self.events = nn.Linear(2, 1), nn.Dropout(0.5), events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        return self.layer(self.dropout(x))


class OwnSGD(torch.optim.SGD):
    """Could draw random numbers in its steps."""


class Operator(Line):
    def setup(self, config: dict[str, Any]) -> None:
        self.events: list[str] = []
        super().setup({"seed": 3, "lr": 0.001, **config})
        self.optimizer.register_step_post_hook(lambda *_: self.events.append("step"))
        if self.first is not None and self.world_rank == 1:
            self.model.register_comm_hook(self.first, late)
        self.reads_ahead = 0
        read_ahead = Feed.read_ahead

        def counted(feed: Feed) -> None:
            self.reads_ahead += 1
            read_ahead(feed)

        Feed.read_ahead = counted  # type: ignore[method-assign]
        torch.manual_seed(self.world_rank)

    def make_model(self) -> nn.Module:
        return Watched(self.events)

    def make_optimizer(self, model: nn.Module, lr: float) -> Any:
        return self.config.get("optimizer", torch.optim.SGD)(model.parameters(), lr=lr)

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        self.first = Path(config["folder"], "first") if "folder" in config else None
        self.data = Noisy(self.events, self.first if self.world_rank == 0 else None)
        return {"train_loader": DataLoader(self.data, batch_size=BATCH, num_workers=config.get("processes", 0))}

    def taken(self) -> list[str]:
        taken = list(self.events)
        self.events.clear()
        return taken


def late(first, bucket):  # DDP checks annotations, and accepts only its own
    """Begin this rank's part of an exchange when the other rank has read its second batch."""
    until = time.monotonic() + PATIENCE_S
    while not first.exists():
        if time.monotonic() > until:
            raise TimeoutError("the other rank reads no batch while it waits for the exchange")
        time.sleep(0.01)
    return allreduce_hook(None, bucket)


class OwnBatch(Operator):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(batch, batch_info)


class OwnEpoch(Operator):
    def train_epoch(self, *given: Any, **named: Any) -> dict[str, Any]:
        return super().train_epoch(*given, **named)


class Assigned(Operator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.train_batch = super().train_batch  # type: ignore[method-assign]


class OwnCurriculum(Operator):
    def on_step(self, info: dict[str, Any]) -> None:
        """It could change the data."""


def made_with(operator: type = Operator, options: TrainingOptions | None = None, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator, num_workers=2, use_gpu=False, seed=5, options=options, config=config
    )


class Begun:
    """A trainer, and what its workers have before their first batch."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer, self._state = trainer, trainer.state_dict()

    def again(self) -> TorchTrainer:
        """Return it as it was at the beginning."""
        self.trainer.load_state_dict(self._state)
        self.trainer.apply_all_operators(Operator.taken)
        return self.trainer


@pytest.fixture(scope="module")
def begun(ray_cluster: None) -> Iterator[Begun]:
    with made_with() as trainer:
        yield Begun(trainer)


def events(of: TorchTrainer) -> list[str]:
    first, second = of.apply_all_operators(Operator.taken)
    assert first == second
    return first  # type: ignore[no-any-return]


AHEAD = ["read", *["forward", "read", "step"] * 3, "forward", "step"]
IN_TURN = ["read", "forward", "step"] * 4


def test_the_next_batch_is_read_before_the_step(begun: Begun) -> None:
    ahead = begun.again()
    ahead.train()
    assert events(ahead) == AHEAD
    found = weights(ahead)
    plain = begun.again()
    plain.train(profile=True)  # "grad" is to be the time of the backward pass alone
    assert events(plain) == IN_TURN
    assert torch.equal(weights(plain), found)


@on_workers
def test_the_next_batch_is_read_before_the_exchange_has_ended(tmp_path: Path) -> None:
    with made_with(folder=str(tmp_path)) as ahead:
        assert ahead.train()["batch_count"] == 4


READING_LATER: dict[str, tuple[type, dict[str, Any], TrainingOptions | None]] = {
    "own batches": (OwnBatch, {}, None),
    "an option": (Operator, {}, TrainingOptions(read_ahead=False)),
    "accumulation": (Operator, {}, TrainingOptions(accumulate=2)),
    "own epoch": (OwnEpoch, {}, None),
    "an assigned method": (Assigned, {}, None),
    "own curriculum": (OwnCurriculum, {}, None),
    "own optimizer": (Operator, {"optimizer": OwnSGD}, None),
    "loader processes": (Operator, {"processes": 1}, None),
    "no DDP": (Operator, {}, TrainingOptions(parallel=None)),
}


@pytest.mark.parametrize(
    ("operator", "config", "options"),
    [
        pytest.param(*case, id=name, marks=[] if name in ("own batches", "an option") else pytest.mark.more)
        for name, case in READING_LATER.items()
    ],
)
@on_workers
def test_other_operators_read_between_two_batches(
    operator: type, config: dict[str, Any], options: TrainingOptions | None
) -> None:
    with made_with(operator, options, **config) as other:
        other.train()
        assert other.apply_all_operators(lambda operator: operator.reads_ahead) == [0, 0]
        assert events(other).count("forward") == 4


def test_an_error_is_raised_when_the_batch_is_needed(begun: Begun) -> None:
    """The steps before it are done on all ranks."""
    trainer = begun.again()
    trainer.apply_all_operators(lambda operator: setattr(operator.data, "broken", 2 * 2 * BATCH + 1))
    with pytest.raises(LookupError, match="sample 13 is damaged"):
        trainer.train()
    assert trainer.apply_all_operators(lambda operator: operator.events.count("step")) == [2, 2]
    trainer.apply_all_operators(lambda operator: setattr(operator.data, "broken", None))


# -- the feed alone -------------------------------------------------------------------------------------


class Counted:
    """A source of four batches, which notes how many were drawn."""

    loader: Any = None
    drawn = 0

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        self.drawn = 0

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        while (offset := offset + 1) <= 4:
            self.drawn = offset
            yield Drawn(offset, offset)

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        return 4 - offset


def made(control: Control | None = None, **options: Any) -> tuple[Feed, Counted]:
    source = Counted()
    return Feed(source, Position(call_epoch=1), RankInfo(), control or Control(), **options), source


def batches_of(feed: Feed) -> Iterator[Any]:
    for step in feed:
        yield step.current.batch
        feed.position.commit(step)


def test_all_batches_are_returned_once_with_any_calls_of_read_ahead() -> None:
    for often in range(3):
        feed, source = made()
        seen = []
        for batch in batches_of(feed):
            for _ in range(often):
                feed.read_ahead()
            assert source.drawn == min(batch + bool(often), 4)
            seen.append(batch)
        assert seen == [1, 2, 3, 4] and feed.position.call_ended


def test_nothing_is_drawn_that_another_call_would_draw() -> None:
    feed, source = made(limit=2)
    for _ in batches_of(feed):
        feed.read_ahead()
    assert source.drawn == 2


def test_nothing_is_drawn_before_a_planned_stop() -> None:
    feed, source = made(control := Control())
    assert next(batches_of(feed)) == 1
    control.propose(1)
    feed.read_ahead()
    assert source.drawn == 1


# -- data that the current weights make -----------------------------------------------------------------


class Rollouts(Dataset[Any]):
    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.operator.rollout(index)


class Stream(IterableDataset[Any]):
    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __iter__(self) -> Iterator[Any]:
        return map(self.operator.rollout, range(8))


class OfTheWeights(Line):
    """Its samples are actions of the current weights, as in reinforcement learning."""

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": DataLoader(config["data"](self), batch_size=2)}

    def rollout(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tensor([index / 8, 1.0])
        with torch.no_grad():
            action = self.unwrapped(self.model)(state)
        return torch.stack([state[0], action[0]]), action * 0.9 + 0.1


def by_hand(*, epochs: int, samples: int) -> torch.Tensor:
    """Return the weights of a loop with so many samples in a step."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for first in [*range(0, 8, samples)] * epochs:
        states = torch.tensor([[index / 8, 1.0] for index in range(first, first + samples)])
        with torch.no_grad():
            actions = torch.cat([model(state).view(1, 1) for state in states])
        loss = nn.functional.mse_loss(model(torch.cat([states[:, :1], actions], dim=1)), actions * 0.9 + 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("data", [Rollouts, Stream])
def test_data_of_the_weights_are_those_of_a_loop_by_hand(data: type) -> None:
    with inline(OfTheWeights, config={"data": data}, options=TrainingOptions(read_ahead=False)) as trainer:
        trainer.fit(2, 0)
        assert torch.equal(weights(trainer), by_hand(epochs=2, samples=2))


@on_workers
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.more)])
def test_data_of_the_weights_are_those_of_a_loop_by_hand_on_two_workers(ahead: bool) -> None:
    """By default, they are made of the weights before the step."""
    options = TrainingOptions(read_ahead=ahead)
    with inline(OfTheWeights, config={"data": Rollouts}, options=options, num_workers=2) as trainer:
        trainer.fit(2, 0)
        assert torch.allclose(weights(trainer), by_hand(epochs=2, samples=4), rtol=1e-6) == (not ahead)

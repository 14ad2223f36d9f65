"""A module of an attribute that training changes in place, and nothing saves."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from raysgd.torch.step import attributes
from tests.torch.small import Line, inline

SAID = "has changed self.target, which checkpoints and new workers will not have"


def lerp(target: nn.Module, model: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, rate)


class Holds(Line):
    """Has a copy of the model in `self.target`, and notes how much was logged when each batch begins."""

    log: pytest.LogCaptureFixture

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.target: Any = self.make_target()
        self.logged: list[int] = []

    def make_target(self) -> Any:
        return copy.deepcopy(self.unwrapped()).requires_grad_(False)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.logged.append(sum("has changed" in each for each in self.log.messages))
        found = super().train_batch(batch, batch_info)
        self.moves(batch, batch_info)
        return found

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        """Called at the end of train_batch."""

    def load_state_dict(self, state: Any) -> None:
        """Not needed here."""


class Lerp(Holds):
    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        lerp(self.target, self.unwrapped())


class Data(Holds):
    """Writes to `.data`, which no version counts."""

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        for slow, fast in zip(self.target.parameters(), self.unwrapped().parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1


class InInference(Holds):
    @torch.inference_mode()
    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.target.weight.data.mul_(0.9)


class HardCopy(Holds):
    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.target.load_state_dict(self.unwrapped().state_dict())


class Normalized(Holds):
    """A frozen teacher that is left in train mode."""

    def make_target(self) -> Any:
        return nn.BatchNorm1d(2).requires_grad_(False)

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.target(batch[0])


class NewBuffer(Normalized):
    """Sets a buffer to another tensor, as DINO's loss does with its center."""

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.target.running_mean = self.target.running_mean * 0.9 + batch[0].mean(0) * 0.1


class Several(Lerp):
    def make_target(self) -> Any:
        return [nn.Linear(2, 1), super().make_target()]

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        lerp(self.target[1], self.unwrapped())


class Named(Several):
    def make_target(self) -> Any:
        return dict(enumerate(super().make_target()))


class Tensors(Holds):
    def make_target(self) -> Any:
        return [each.detach().clone() for each in self.unwrapped().parameters()]

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        torch._foreach_lerp_(self.target, [each.detach() for each in self.unwrapped().parameters()], 0.1)


class Trained(Holds):
    """Trains it with an optimizer of its own."""

    def make_target(self) -> Any:
        self.other = torch.optim.Adam((made := nn.Linear(2, 1)).parameters())
        return made

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.target(batch[0]).sum().backward()
        self.other.step()


class InHook(Holds):
    def on_step(self, info: dict[str, Any]) -> None:
        lerp(self.target, self.unwrapped())


class InLoop(Holds):
    def train_epoch(self, iterator: Any, info: Any) -> Any:
        for batch in iterator:
            self.train_batch(batch, info)
            lerp(self.target, self.unwrapped())
        return {}


class PartlySaved(Lerp):
    def state_dict(self) -> Any:
        return {"weight": self.target.weight}


class Later(Holds):
    """Copies the model in the third step only."""

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        if info["global_step"] == 2:
            self.target.load_state_dict(self.unwrapped().state_dict())


@pytest.mark.parametrize(
    "kind",
    [
        *(Lerp, Data, InInference, HardCopy, Normalized, NewBuffer, Several, Named, Trained, PartlySaved),
        *(InHook, InLoop, Later),  # at the end of the call
    ],
)
def test_what_nobody_saves_is_named_once_in_the_first_call(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "log", caplog, raising=False)
    with inline(kind) as trainer:
        trainer.train()
        assert [SAID in each for each in caplog.messages] == [True]
        logged = [0, 0, 0] if kind in (InHook, InLoop, Later) else [0, 1, 1]
        assert trainer.get_local_operator().logged == logged
        trainer.train()
        assert len(caplog.messages) == 1


class Registered(Lerp):
    def setup(self, config: dict[str, Any]) -> None:
        self.made: list[Any] = []
        super().setup(config)

    def register(self, *, models: Any, **more: Any) -> Any:
        (model, self.made), *rest = super().register(models=[models, copy.deepcopy(models)], **more)
        return model, *rest

    def unwrapped(self, model: Any = None) -> Any:
        return super().unwrapped(self.model)

    def make_target(self) -> Any:
        return self.made


class Saved(Lerp):
    def state_dict(self) -> Any:
        return {"target": self.target.state_dict()}


class SavedElsewhere(Lerp):
    def state_dict(self) -> Any:
        return {"nets": [{"slow": {k: v.clone() for k, v in self.target.state_dict().items()}}]}


class SavedAlone(Lerp):
    def state_dict(self) -> Any:
        return self.target.state_dict()


class Frozen(Normalized):
    def make_target(self) -> Any:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).requires_grad_(False).eval()


class PartOfModel(Holds):
    """Views and parts of what is registered."""

    def make_target(self) -> Any:
        views = nn.Module()
        views.register_buffer("view", self.unwrapped().weight[0, 1:].detach())
        views.register_buffer("data", self.unwrapped().bias.data)
        return [self.unwrapped(), views]


class Measures(Holds):
    def make_target(self) -> Any:
        self.metric = self.register_metrics(train=MeanMetric())
        return MeanMetric()

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        self.metric.update(batch[0])
        self.target.update(batch[0])


class Many(Lerp):
    """Has more modules in a list than are looked at."""

    def make_target(self) -> Any:
        return [super().make_target(), *(nn.Identity() for _ in range(100))]

    def moves(self, batch: Any, info: dict[str, Any]) -> None:
        lerp(self.target[0], self.unwrapped())


class Unusual(Holds):
    """What has no elements to look at."""

    def make_target(self) -> Any:
        nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
        every = [nn.LazyLinear(1), torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(0), nested]
        made, usual = nn.Module(), [torch.ones(2, dtype=torch.complex64).conj(), torch.ones((), dtype=torch.bfloat16)]
        for number, each in enumerate([*every[1:], *usual]):
            made.register_buffer(f"own_{number}", each)
        return [every[0], made]


@pytest.mark.parametrize(
    "kind",
    [Line, Holds, Registered, Saved, SavedElsewhere, SavedAlone, Frozen, PartOfModel, Unusual, Measures, Tensors, Many],
)
def test_nothing_is_said_of_what_is_saved_or_does_not_move(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "log", caplog, raising=False)
    with inline(kind) as trainer:
        for _ in range(2):
            trainer.train()
    assert [each for each in caplog.messages if "has changed" in each] == []


@pytest.mark.parametrize(("rank", "kind", "looks"), [(0, Lerp, True), (1, Lerp, False), (0, Tensors, False)])
def test_only_modules_are_looked_at_and_only_on_rank_0(
    rank: int, kind: Any, looks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, each look waits for it, and it would take seconds with thousands of tensors."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(kind, "log", caplog, raising=False)
    with inline(kind) as trainer:
        operator = trainer.get_local_operator()
        operator._internals.rank_info = replace(operator._internals.rank_info, world_rank=rank)
        monkeypatch.setattr(attributes, "_content", lambda tensor: (seen.append(tensor), b""))
        assert operator._internals.attributes.watch(lambda given: given is operator)
    assert bool(seen) == looks

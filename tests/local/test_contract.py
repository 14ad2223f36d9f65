"""Unusual code: while a worker computes several parts, it ends with the weights of an undisturbed run, or it is refused, or the
log says what differs."""

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from raysgd import ConfigError, ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of

EPOCHS, ROWS, BATCH = 2, 44, 4  # the last step of an epoch has fewer samples


class Plain(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = self.make_model()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=self.make_criterion()
        )
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = TensorDataset(x, (2 * x).sin().sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, BATCH, shuffle=True, collate_fn=self.collate))
        self.more()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def make_criterion(self) -> nn.Module:
        return nn.MSELoss()

    def more(self) -> None:
        """Called at the end of `setup`."""

    @staticmethod
    def collate(rows: Any) -> Any:
        return default_collate(rows)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.before(batch_info)
        loss = self.loss(batch)
        self.backward(loss)
        self.between(batch_info)
        self.step()
        self.after(batch_info)
        return {"train_loss": loss.detach()}

    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        return loss

    def before(self, info: dict[str, Any]) -> None:
        """Called before the forward pass."""

    def between(self, info: dict[str, Any]) -> None:
        """Called between the backward pass and the step."""

    def after(self, info: dict[str, Any]) -> None:
        """Called after the step."""


class Run:
    def __init__(self, kind: type[TrainingOperator], workers: int, *faults: Fault, left: int = 0, **more: Any) -> None:
        elastic = ElasticConfig(grow=more.pop("grow", False), hang_timeout_s=60)
        given: dict[str, Any] = {"num_workers": workers, "use_gpu": False, "elastic": elastic, "seed": 3, **more}
        with Cluster(faults) as cluster, TorchTrainer(training_operator_cls=kind, **given) as trainer:
            if left:
                trainer.resize(left)
            for _ in range(EPOCHS):
                trainer.train(max_retries=-1)
            assert not cluster.left
            self.weights, self.mode = weights_of(trainer), trainer.batch_mode

    def assert_equals(self, other: "Run") -> None:
        torch.testing.assert_close(self.weights, other.weights, rtol=1e-9, atol=1e-11)


FAULT, FIRST = Fault("kill", "forward", rank=1, step=3), Fault("kill", "reduced", rank=0, step=3)
DISTURBED: dict[str, Callable[[Any], Run]] = {
    "one of two": lambda kind: Run(kind, 2, FAULT),
    "the first, replaced": lambda kind: Run(kind, 2, FIRST, grow=True),
    "one from the beginning": lambda kind: Run(kind, 2, left=1),
    "one of four": lambda kind: Run(kind, 4, FAULT),
}


def workers_in(course: str) -> int:
    return 4 if course == "one of four" else 2


# -- what is equal -------------------------------------------------------------------------------------------


class Cooling(Plain):
    """Changes its rate for the next step, whichever that is."""

    def after(self, info: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.95


class CoolingBefore(Plain):
    def between(self, info: dict[str, Any]) -> None:
        Cooling.after(self, info)  # type: ignore[arg-type]


class Decaying(Plain):
    """Its weights decay by hand, after each step."""

    def after(self, info: dict[str, Any]) -> None:
        for each in self.unwrapped().parameters():
            each.data.mul_(0.99)


class Averaging(Plain):
    """Averages its weights after each step, in a registered model, and trains towards that."""

    class Pair(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.mean = model, copy.deepcopy(model).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.3 * self.model(x) - 0.3 * self.mean(x)

    def make_model(self) -> nn.Module:
        return self.Pair(super().make_model())

    def after(self, info: dict[str, Any]) -> None:
        pair = self.unwrapped()
        for mean, own in zip(pair.mean.parameters(), pair.model.parameters(), strict=True):
            mean.data.lerp_(own.data, 0.2)


class Penalized(Plain):
    """Has a penalty on the gradients of its samples, and another pass with the same graph."""

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_(True)
        output = self.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss: torch.Tensor = self.criterion(output, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        (0.5 * loss).backward(retain_graph=True)
        return 0.5 * loss


class Noisy(Plain):
    """Draws with each generator, in its batches and in what collates them."""

    @staticmethod
    def collate(rows: Any) -> Any:
        x, y = default_collate(rows)
        return x + 0.1 * random.random() * torch.from_numpy(numpy.random.normal(size=x.shape)), y

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * random.uniform(0.5, 1.5) * float(numpy.random.uniform(0.5, 1.5))


class LeavingOut(Plain):
    """Makes no step in some batches, and no passes in others."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] % 4 == 1:
            return {"train_loss": 0.0}
        self.zero_grad()
        self.backward(self.loss(batch))
        if batch_info["global_step"] % 4 != 3:
            self.step()
        return {"train_loss": 0.0}


class Counting(Plain):
    """Computes with a buffer that counts its forward passes."""

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            return x * (1 + 0.1 * self.passes)

    def make_model(self) -> nn.Module:
        return nn.Sequential(self.Passes(), super().make_model())


class ClippingOnce(Plain):
    """Changes the gradients of a step once, after its last part."""

    def between(self, info: dict[str, Any]) -> None:
        if info["last_part"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ClippingByACopy(Plain):
    def between(self, info: dict[str, Any]) -> None:
        if {**info}["last_part"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


KEPT = [
    Plain,
    Cooling,
    CoolingBefore,
    Decaying,
    Averaging,
    Penalized,
    Noisy,
    LeavingOut,
    Counting,
    ClippingOnce,
    ClippingByACopy,
]


@pytest.mark.parametrize("kind", KEPT)
def test_code_that_changes_what_is_registered_is_equal(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    for course, run in DISTURBED.items():
        caplog.clear()
        mine = run(kind)
        assert mine.mode == "parts" and not [each for each in caplog.messages if "train_batch" in each], course
        mine.assert_equals(Run(kind, workers_in(course)))


# -- what is refused -----------------------------------------------------------------------------------------


class Clipping(Plain):
    def between(self, info: dict[str, Any]) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class Replacing(Plain):
    def between(self, info: dict[str, Any]) -> None:
        for each in self.model.parameters():
            each.grad = each.grad + 0.01


class ClippingInStep(Plain):
    def step(self, optimizer: Any = None) -> bool:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return super().step(optimizer)


class ClippingLater(Clipping):
    def between(self, info: dict[str, Any]) -> None:
        if info["global_step"] > 1:
            super().between(info)


class Clearing(Plain):
    """Also calls torch's method."""

    def before(self, info: dict[str, Any]) -> None:
        self.optimizer.zero_grad(set_to_none=info["global_step"] % 2 == 0)


class ClearingAfter(Plain):
    def after(self, info: dict[str, Any]) -> None:
        self.optimizer.zero_grad()


class LeavingPartsOut(Plain):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        out = batch_info["global_step"] > 3 and batch_info["part"] == 1
        return {"train_loss": 0.0} if out else super().train_batch(batch, batch_info)


CHANGES = "changes or clears gradients between the backward passes of two parts"
REFUSED = [(kind, CHANGES) for kind in (ClippingLater, Clearing, ClearingAfter)]


@pytest.mark.parametrize(("kind", "says"), [*REFUSED, (LeavingPartsOut, "in some parts of a batch only")])
def test_code_that_changes_sums_of_gradients_is_refused(kind: Any, says: str, caplog: Any) -> None:
    for course in ("one of two", "the first, replaced"):
        with pytest.raises(ConfigError, match=says):
            DISTURBED[course](kind)
    if kind not in (LeavingPartsOut, ClippingLater):  # the first step shows it
        assert DISTURBED["one from the beginning"](kind).mode == "per_worker"
        assert sum(says in each and "cannot be divided into parts" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("kind", [Clipping, Replacing, ClippingInStep])
def test_the_first_step_shows_that_gradients_are_changed_after_the_backward_pass(kind: Any, caplog: Any) -> None:
    for course in ("one of two", "the first, replaced"):
        caplog.clear()
        assert DISTURBED[course](kind).mode == "per_worker"
        assert sum("changes gradients after the backward pass" in each for each in caplog.messages) == 1, course


# -- what the log says ---------------------------------------------------------------------------------------


class Numbering(Plain):
    def more(self) -> None:
        self.passes, self.fixed = 0, object()

    def loss(self, batch: Any) -> torch.Tensor:
        self.passes += 1
        return super().loss(batch) / self.passes


class Saved(Numbering):
    def state_dict(self) -> Any:
        return {"passes": self.passes}

    def load_state_dict(self, state: Any) -> None:
        """Not needed here."""


def test_the_log_names_what_is_not_saved_and_what_each_part_changes(caplog: Any) -> None:
    Run(Numbering, 2)
    saved = "train_batch has changed self.passes, which checkpoints and new workers will not have"
    assert [each[: len(saved)] for each in caplog.messages] == [saved]
    parts = "train_batch has changed self.passes, and this worker computes several parts of a batch"
    for course in ("one of two", "the first, replaced"):
        caplog.clear()
        DISTURBED[course](Numbering)
        said = [each for each in caplog.messages if "train_batch" in each]
        assert len(said) == 2 and said[0].startswith(saved) and said[1].startswith(parts), course


def test_the_log_names_what_each_part_changes_although_it_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    Run(Saved, 2)
    assert not caplog.messages
    DISTURBED["one of two"](Saved)
    assert sum("and this worker computes several parts" in each for each in caplog.messages) == 1


class BySize(Plain):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.world_size


class ByRank(Plain):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + self.world_rank)


class OnFirst(Plain):
    """Reads its rank after the pass, and before it whether it is the first."""

    def before(self, info: dict[str, Any]) -> None:
        assert self.is_first in (True, False)

    def between(self, info: dict[str, Any]) -> None:
        assert self.world_rank < self.world_size


class TwoPasses(Plain):
    """Reads nothing; raysgd does, between the passes."""

    def between(self, info: dict[str, Any]) -> None:
        self.backward(self.model(torch.ones(1, 4, dtype=torch.float64)).mean())


@pytest.mark.parametrize(
    ("kind", "name"), [(BySize, "world_size"), (ByRank, "world_rank"), (OnFirst, ""), (TwoPasses, "")]
)
def test_the_log_names_numbers_of_workers_that_enter_the_loss(kind: Any, name: str, caplog: Any) -> None:
    Run(kind, 2, parts=4)  # once, also if a rank has several parts
    assert [each.partition(" before")[0] for each in caplog.messages] == (
        [f"train_batch reads self.{name}"] * bool(name)
    )
    assert ("raysgd averages gradients over the workers itself" in caplog.text) == bool(name)


class Epochs(Plain):
    """Counts the epochs that it begins."""

    def more(self) -> None:
        self.begun, self.temperature = 0, 0.0

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        self.begun += 1
        self.temperature = 0.9**epoch_idx
        return super().train_epoch(iterator, info, num_steps, epoch_idx)


def test_the_log_names_what_a_repeated_train_epoch_changes_again(caplog: pytest.LogCaptureFixture) -> None:
    Run(Epochs, 2)
    assert not caplog.messages
    DISTURBED["one of two"](Epochs)
    assert sum("and it has changed self.begun again before its loop" in each for each in caplog.messages) == 1


class Policy(Plain):
    """Makes its steps in `train_epoch`, as for reinforcement learning."""

    train_batch = TrainingOperator.train_batch

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        for batch in iterator:
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.optimizer.step()
        return {}


@pytest.mark.parametrize("left", [0, 1])
def test_the_log_names_the_method_that_is_overridden(left: int, caplog: pytest.LogCaptureFixture) -> None:
    assert Run(Policy, 2, left=left).mode == "per_worker"
    (said,) = [each for each in caplog.messages if "cannot be divided into parts" in each]
    assert said.startswith(
        "train_epoch has a loop of its own" if not left else "train_epoch calls optimizer.step() itself"
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "raysgd")

"""A step that is made again begins with the weights of the last one, also if user code moves them before its optimizer acts."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from raysgd.torch.step.moved_weights import RestoreWeights
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of

pytestmark = pytest.mark.usefixtures("quiet")

STEPS = 5


class Moves(TrainingOperator):
    """All samples are alike, so that the gradient is that of any number of workers."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 1).double(), nn.Linear(3, 1).double().requires_grad_(False)
        self.optimizer = self.make_optimizer()
        self.register(models=nn.ModuleList([self.student, self.teacher]), optimizers=self.optimizer)
        x = torch.tensor([[0.3, -0.2, 0.9]]).double().expand(80, 3)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.004, momentum=0.5)

    def loss(self, batch: Any, model: Any = None) -> torch.Tensor:
        x, y = batch
        return ((self.student(x) - y) ** 4).mean() + ((self.student(x) - self.teacher(x)) ** 2).mean()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.make_step(batch)
        return {}


class Sam(Moves):
    def make_step(self, batch: Any) -> None:
        self.backward(self.loss(batch))
        parameters = list(self.student.parameters())
        kept = [each.data.clone() for each in parameters]
        for each in parameters:
            each.data.add_(0.1 * each.grad.sign())  # which no version counts
        self.zero_grad()
        Cluster.running.point("moved")
        self.backward(self.loss(batch))
        for each, before in zip(parameters, kept, strict=True):
            each.data = before
        self.step()


class MomentumEncoder(Moves):
    def make_step(self, batch: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.mul_(0.9).add_(0.1 * fast.data)
        Cluster.running.point("moved")
        self.loss(batch).backward()
        self.optimizer.step()


class Copy(MomentumEncoder):
    """Its encoder begins as a copy, which the first step does not change."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.teacher.load_state_dict(self.student.state_dict())


class WithHelpers(Copy):
    def make_step(self, batch: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
        self.zero_grad()
        self.backward(self.loss(batch))
        self.step()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.make_step(batch)
        return {}


class Iterative(Moves):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.student.parameters(), lr=0.2, max_iter=3, history_size=4)

    def make_step(self, batch: Any) -> None:
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                Cluster.running.point("moved")
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Usual(Moves):
    def make_step(self, batch: Any) -> None:
        self.backward(self.loss(batch))
        self.step()
        self.teacher.weight.data.mul_(0.9)  # after the step


def trained(operator: type[TrainingOperator], *faults: Fault) -> tuple[torch.Tensor, list[int]]:
    with (
        Cluster(faults) as cluster,
        TorchTrainer(
            training_operator_cls=operator, num_workers=3, use_gpu=False, elastic=ElasticConfig(batch="per_worker")
        ) as run,
    ):
        run.train(num_steps=STEPS)
        run.train(num_steps=STEPS, max_retries=-1)
        assert not cluster.left
        return weights_of(run), [each.batches_redone for each in run.recoveries]


@pytest.mark.parametrize("step", [0, 7], ids=["the first", "a later one"])
@pytest.mark.parametrize("operator", [Sam, MomentumEncoder, Copy, Iterative])
def test_a_step_that_is_made_again_begins_with_the_last_weights(operator: type[TrainingOperator], step: int) -> None:
    undisturbed, _ = trained(operator)
    found, redone = trained(operator, Fault("kill", "moved", rank=2, step=step))
    torch.testing.assert_close(found, undisturbed, rtol=1e-12, atol=1e-12)
    assert redone == [0, 0][: len(redone)] and redone


def test_weights_move_once_for_all_parts_of_a_batch() -> None:
    found = []
    for left in (2, 1):
        with Cluster(), TorchTrainer(training_operator_cls=WithHelpers, num_workers=2, use_gpu=False) as run:
            run.train(num_steps=2)
            run.resize(left)
            run.train(num_steps=STEPS)
            assert run.batch_mode == "parts"
            found.append(weights_of(run))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_weights_that_move_after_the_step_are_not_copied() -> None:
    kept = {}
    for operator in (Usual, MomentumEncoder):
        with Cluster(), TorchTrainer(training_operator_cls=operator, num_workers=2, use_gpu=False) as run:
            run.train(num_steps=2)
            found = run.apply_all_operators(
                lambda operator: [
                    len(each._now) for each in operator._internals.policies.every if isinstance(each, RestoreWeights)
                ]
            )
            kept[operator] = found[0]
    assert kept == {Usual: [0], MomentumEncoder: [2]}


class Target(Moves):
    """Has the teacher in an attribute only, and moves it in train_batch."""

    def register(self, *, models: Any, optimizers: Any, **more: Any) -> Any:
        return super().register(models=self.student, optimizers=optimizers, **more)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.backward(self.loss(batch))
        self.step()
        self.moves()
        return {}

    @torch.no_grad()
    def moves(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.3)


class RegisteredTarget(Target):
    def register(self, *, models: Any, optimizers: Any, **more: Any) -> Any:
        return Moves.register(self, models=[self.student, self.teacher], optimizers=optimizers, **more)


class SavedTarget(Target):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.backward(self.loss(batch))
        self.step()
        return {}

    def on_step(self, info: dict[str, Any]) -> None:
        self.moves()

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.teacher.load_state_dict(state["slow"])


@pytest.mark.parametrize(("operator", "equal"), [(Target, False), (RegisteredTarget, True), (SavedTarget, True)])
def test_a_replacement_and_a_load_have_the_target_or_the_log_says_that_they_lack_it(
    operator: type[TrainingOperator], equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("raysgd").disabled = False
    said = "train_batch has changed self.teacher, which checkpoints and new workers will not have"
    found = []
    for faults in [(), (Fault("kill", "forward", rank=1, step=4),)]:
        caplog.clear()
        with (
            Cluster(faults) as cluster,
            TorchTrainer(training_operator_cls=operator, num_workers=2, use_gpu=False) as run,
        ):
            run.train(num_steps=2 * STEPS, max_retries=-1)
            run.resize(2)  # waits for the replacement worker
            state = run.state_dict()
            run.train(num_steps=STEPS)
            assert not cluster.left and bool(run.recoveries) == bool(faults)
            found.append(weights_of(run))
        assert sum(said in each for each in caplog.messages) == (not equal)
    with Cluster(), TorchTrainer(training_operator_cls=operator, num_workers=2, use_gpu=False) as run:
        run.load_state_dict(state)
        run.train(num_steps=STEPS)
        found.append(weights_of(run))
    far = [float((each - found[0]).abs().max()) for each in found[1:]]
    assert max(far) < 1e-12 if equal else min(far) > 1e-4, far

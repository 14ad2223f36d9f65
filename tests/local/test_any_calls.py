"""Any sequence of calls and faults: what a trainer returns, saves and computes is what a hand-written loop gives.

`Calls` knows at which step the weights are. The steps themselves are computed once, by plain PyTorch, from the order in which an
undisturbed run uses the samples.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CheckpointError, ElasticConfig, RaysgdError, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.tiers import NIGHTLY

ROWS, BATCH, WORKERS, MOST_STEPS = 26, 6, 3, 40
STEPS = -(-ROWS // BATCH)  # of an epoch
KINDS = st.sampled_from(["kill", "freeze"])
POINTS = ("begun", "reduced", "applied", "stepped")


def samples() -> TensorDataset:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7)).double()
    return TensorDataset(torch.arange(ROWS), x, (3 * x).sin().sum(1, keepdim=True))


def made() -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Curve(TrainingOperator):
    """It notes which samples its weights have seen. `config["share"]` is the part of a batch that a worker has."""

    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer, schedule = made()
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=schedule
        )
        size = BATCH // config["workers"]
        self.register_data(
            train_loader=DataLoader(samples(), batch_size=size, shuffle=True),
            validation_loader=DataLoader(samples(), batch_size=size),
        )
        self.seen: list[list[int]] = []
        self.step_of, self.together = -1, set[int]()
        self.optimizer.register_step_post_hook(lambda *_: self.seen.append(sorted(self.together)))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        point("begun")
        if batch_info["global_step"] != self.step_of:  # otherwise it is a further piece, or the batch is trained again
            self.step_of, self.together = batch_info["global_step"], set()
        self.together |= {each for part in together(batch[0].tolist()) for each in part}
        result = super().train_batch(batch[1:], batch_info)
        point("stepped")
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        point("validate")
        return super().validate_batch(batch[1:], batch_info)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        point("predict")
        return self.model(batch[1])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        point("load_state_dict")
        self.seen = [list(each) for each in state["seen"]]


def on_worker() -> bool:
    return Cluster.running._has_group()


def point(name: str) -> None:
    if on_worker():
        Cluster.running.point(name)


def together(value: Any) -> list[Any]:
    return Cluster.running.together(value) if on_worker() else [value]


def trainer(workers: int = WORKERS, **given: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Curve,
        config={"workers": workers},
        num_workers=workers,
        use_gpu=False,
        seed=5,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(hang_timeout_s=60, snapshot_every=1, grow=False),
        **given,
    )


@lru_cache(maxsize=1)
def by_hand() -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return the weights after each step, and the samples of each step."""
    with Cluster(), trainer() as run:
        run.train(num_steps=MOST_STEPS)
        (used, *others) = run.apply_all_operators(lambda operator: operator.seen)
        assert all(each == used for each in others)
    model, optimizer, schedule = made()
    _, x, y = samples().tensors
    weights = [nn.utils.parameters_to_vector(model.parameters()).detach()]
    for rows in used:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return weights, used


def model_at(step: int) -> nn.Module:
    model = made()[0]
    nn.utils.vector_to_parameters(by_hand()[0][step], model.parameters())
    return model


def loss_at(step: int) -> float:
    _, x, y = samples().tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model_at(step)(x), y))


class Calls(RuleBasedStateMachine):
    """`step` is where the weights must be, `saved` what each file must hold; `on` is how the trainer runs."""

    on = "simulated workers"

    @initialize()
    def begin(self) -> None:
        by_hand()
        self.folder = TemporaryDirectory()
        self.cluster = Cluster()
        if self.on != "inline":
            self.cluster.__enter__()
        self.step, self.saved, self.calls = 0, dict[str, int](), 0
        self.run = self.started()

    def started(self) -> TorchTrainer:
        self.rows = list[tuple[str, int]]()
        self.losses = 0
        return trainer(1) if self.on == "inline" else trainer()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.shutdown()
            self.folder.cleanup()
            if self.on != "inline":
                self.cluster.__exit__(None, None, None)

    def trained(self, result: dict[str, Any], steps: int) -> None:
        before, self.step = self.step, self.step + steps
        assert result["batch_count"] == steps
        assert result["num_samples"] == sum(map(len, by_hand()[1][before : self.step]))
        assert result["epoch"] == -(-self.step // STEPS)
        self.rows.append(("train", result["epoch"]))

    def fault(self, draw: Any, at: tuple[str, ...], *, first: int = 0, steps: int = 1) -> bool:
        """Let a fault happen in one of the next call's `steps`, or none. Return whether it must have happened."""
        if self.on == "inline" or not draw(st.booleans()):
            return False
        ranks = draw(st.sets(st.integers(0, self.run.world_size - 1), min_size=1))
        kind, place, after = draw(KINDS), draw(st.sampled_from(at)), draw(st.integers(0, steps - 1))
        self.cluster.faults(*(Fault(kind, place, rank=rank, step=first + after) for rank in sorted(ranks)))
        return True

    def after_fault(self, happened: bool) -> None:
        if happened:  # a rank that the death of another one interrupts may not reach its own fault
            self.cluster.left.clear()
            self.losses += 1
            assert len(self.run.recoveries) >= self.losses

    # -- calls ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.step + STEPS <= MOST_STEPS)
    @rule(data=st.data())
    def train(self, data: Any) -> None:
        steps = STEPS - self.step % STEPS
        happened = self.fault(data.draw, POINTS, first=self.step, steps=steps)
        self.trained(self.run.train(max_retries=-1), steps)
        self.after_fault(happened)

    @precondition(lambda self: self.step + 2 * STEPS <= MOST_STEPS)
    @rule(data=st.data(), steps=st.integers(1, 2 * STEPS))
    def train_steps(self, data: Any, steps: int) -> None:
        happened = self.fault(data.draw, POINTS, first=self.step, steps=steps)
        self.trained(self.run.train(num_steps=steps, max_retries=-1), steps)
        self.after_fault(happened)

    @rule(data=st.data())
    def validate(self, data: Any) -> None:
        happened = self.fault(data.draw, ("validate",))
        result = self.run.validate()
        assert result["num_samples"] == ROWS and result["val_loss"] == pytest.approx(loss_at(self.step), rel=1e-9)
        self.rows.append(("validate", -(-self.step // STEPS)))
        self.after_fault(happened)

    @rule()
    def predict(self) -> None:
        data = samples()
        with torch.no_grad():
            expected = model_at(self.step)(data.tensors[1])
        torch.testing.assert_close(self.run.predict(data, batch_size=4), expected, rtol=1e-9, atol=1e-9)

    @rule(how=st.sampled_from(["file", "sharded", "background"]), over=st.booleans())
    def save(self, how: str, over: bool) -> None:
        name = f"{how}-{0 if over else len(self.saved)}"
        path = Path(self.folder.name, name if how == "sharded" else f"{name}.pt")
        kept = self.run.save(path, **{"sharded": {"sharded": True}, "background": {"blocking": False}}.get(how, {}))
        if how == "background":
            kept.result()
        self.saved[str(path)] = self.step

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        path = data.draw(st.sampled_from(sorted(self.saved)))
        happened = self.fault(data.draw, ("load_state_dict",))
        self.run.load(path, trusted=True)
        self.step = self.saved[path]
        self.after_fault(happened)

    @rule(steps=st.integers(1, 3))
    def state_dict_and_back(self, steps: int) -> None:
        if self.step + steps <= MOST_STEPS:
            state = self.run.state_dict()
            self.run.train(num_steps=steps)
            self.rows.append(("train", -(-(self.step + steps) // STEPS)))
            self.run.load_state_dict(state)

    @precondition(lambda self: self.on != "inline")
    @rule(size=st.integers(1, WORKERS))
    def resize(self, size: int) -> None:
        self.run.resize(size)
        assert self.run.world_size == size

    @precondition(lambda self: self.on != "inline")
    @rule(data=st.data())
    def a_worker_is_killed_between_calls(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(range(len(self.cluster.workers))))
        self.cluster.workers[worker].die("SIGKILL")

    @precondition(lambda self: self.saved)
    @rule(path=st.data())
    def shut_down_and_continue_from_a_file(self, path: Any) -> None:
        self.run.shutdown()
        for call in (self.run.train, self.run.validate, self.run.state_dict):
            with pytest.raises(RaysgdError, match="shut down"):
                call()
        self.run = self.started()
        chosen = path.draw(st.sampled_from(sorted(self.saved)))
        self.run.load(chosen, trusted=True)
        self.step = self.saved[chosen]

    @precondition(lambda self: self.on != "inline" and self.saved)
    @rule(data=st.data(), steps=st.integers(1, STEPS))
    def another_trainer_in_this_process_continues_from_a_file(self, data: Any, steps: int) -> None:
        path = data.draw(st.sampled_from(sorted(self.saved)))
        step = min(self.saved[path] + steps, MOST_STEPS)
        with self.cluster.left_alone():
            other = trainer(1)
        with other:
            other.load(path, trusted=True)
            if step > self.saved[path]:
                other.train(num_steps=step - self.saved[path])
            torch.testing.assert_close(weights_of(other), by_hand()[0][step], rtol=1e-9, atol=1e-9)
            assert other.validate()["val_loss"] == pytest.approx(loss_at(step), rel=1e-9)

    @rule(name=st.sampled_from(["no such file", "torn"]))
    def load_what_is_no_checkpoint(self, name: str) -> None:
        path = Path(self.folder.name, f"{name}.pt")
        if name == "torn":
            path.write_bytes(b"PK\x03\x04 and nothing more")
        with pytest.raises((CheckpointError, FileNotFoundError)):
            self.run.load(path)

    # -- what holds after each of them ----------------------------------------------------------------

    @invariant()
    def weights_are_those_of_the_step(self) -> None:
        if hasattr(self, "run"):
            torch.testing.assert_close(weights_of(self.run), by_hand()[0][self.step], rtol=1e-9, atol=1e-9)
            model = self.run.get_model(to_cpu=True)
            found = nn.utils.parameters_to_vector(model.parameters()).detach()
            torch.testing.assert_close(found, by_hand()[0][self.step], rtol=1e-9, atol=1e-9)

    @invariant()
    def each_sample_was_used_in_its_step(self) -> None:
        if hasattr(self, "run"):
            for used in self.run.apply_all_operators(lambda operator: operator.seen):
                assert used == by_hand()[1][: self.step]

    @invariant()
    def history_has_a_row_for_each_call(self) -> None:
        if hasattr(self, "run"):
            assert [(row["kind"], row["epoch"]) for row in self.run.history] == self.rows


class InlineCalls(Calls):
    on = "inline"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("raysgd").disabled = True
    yield
    logging.getLogger("raysgd").disabled = False


def test_the_model_uses_each_sample_once_in_each_epoch() -> None:
    used = by_hand()[1]
    for first in range(0, MOST_STEPS - STEPS, STEPS):
        assert sorted(row for step in used[first : first + STEPS] for row in step) == [*range(ROWS)]


SOME = settings(
    max_examples=200 if NIGHTLY else 8,
    stateful_step_count=25 if NIGHTLY else 12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCalls, TestInlineCalls = Calls.TestCase, InlineCalls.TestCase
TestCalls.settings = TestInlineCalls.settings = SOME

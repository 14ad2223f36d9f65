"""A step that is undone leaves nothing of itself, whatever acts in it: the state is that of a run in which it was never begun."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault

pytestmark = pytest.mark.usefixtures("quiet")

ROWS, WORKERS, BEFORE, STEPS = 36, 3, 2, 4


class Broken(Exception):
    pass


class Everything(TrainingOperator):
    """Changes in each batch, before its step, all that a step can change."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        fast = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.model, self.slow = (
            (fast, nn.Linear(4, 1)) if config.get("half") else (fast.double(), nn.Linear(4, 1).double())
        )
        self.slow.requires_grad_(False)
        both = nn.ModuleDict({"fast": self.model, "slow": self.slow})
        kind: Any = torch.optim.LBFGS if config.get("closure") else torch.optim.SGD
        more = {"max_iter": 3} if config.get("closure") else {"momentum": 0.5}
        self.optimizer = kind(self.model.parameters(), lr=0.05, **more)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.register(models=both, optimizers=self.optimizer, criterion=nn.MSELoss(), schedulers=self.schedule)
        self.criterion = nn.MSELoss()
        x = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1)).to(next(fast.parameters()).dtype)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))
        self.breaks = False

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        state = self.part_state
        state["batches"] = state.get("batches", 0) + 1
        state["sum"] = state.get("sum", torch.zeros(3)) + x.float().sum(0)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        for slow, fast in zip(self.slow.parameters(), self.model[2].parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
        spoils = bool(self.config.get("spoils")) and batch_info["global_step"] == BEFORE - 1
        calls = 0

        def loss() -> torch.Tensor:
            with self.autocast():
                return self.criterion(self.model(x), y) * (torch.inf if spoils else 1.0)

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                self.may_break(batch_info)
            self.optimizer.zero_grad()
            found = loss()
            found.backward()
            return found

        if self.config.get("closure"):
            self.optimizer.step(closure)
            return {"num_samples": len(x)}
        self.zero_grad()
        found = loss()
        self.backward(found, count=len(x)) if self.config.get("counts") else self.backward(found)
        if self._amp_scaler is not None and batch_info["last_part"]:
            self._amp_scaler.unscale_(self.optimizer)  # which a scaler refuses to do twice
        self.may_break(batch_info)
        self.step()
        return {"num_samples": len(x)}

    def may_break(self, info: dict[str, Any]) -> None:
        Cluster.running.point("changed")
        if self.breaks and info["global_step"] == BEFORE + (self.config.get("accumulate", 1) - 1) and info["last_part"]:
            raise Broken


class Catching(Everything):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        with suppress(RuntimeError):
            return super().train_batch(batch, batch_info)
        return {}


# What differs from one batch on each of three workers.
SITUATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "parts": {"left": 2},
    "window": {"accumulate": 2},
    "window in parts": {"accumulate": 2, "left": 1},
    "counts": {"counts": True, "left": 2},
    "counts in a window": {"counts": True, "accumulate": 2},
    "closure": {"closure": True},
    "clipped": {"clip_norm": 0.1, "left": 2},
    "after a skipped step": {"spoils": True, "on_nonfinite": "skip"},
    "half precision": {"half": True, "precision": "fp16"},
    "half precision, parts": {"half": True, "precision": "fp16", "left": 2},
    "half precision, after a skipped step": {"half": True, "precision": "fp16", "spoils": True},
}
OPTIONS = ("accumulate", "clip_norm", "on_nonfinite", "precision")


def trainer(situation: dict[str, Any], operator: type[TrainingOperator] = Everything) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator,
        config=situation,
        num_workers=WORKERS,
        use_gpu=False,
        scheduler_step_freq="batch",
        options=TrainingOptions(**{name: situation[name] for name in OPTIONS if name in situation}),
        elastic=ElasticConfig(hang_timeout_s=60, grow=False),
    )


def begun(situation: dict[str, Any], operator: type[TrainingOperator] = Everything) -> Iterator[TorchTrainer]:
    with Cluster(), trainer(situation, operator) as run:
        run.train(num_steps=BEFORE)
        if "left" in situation:
            run.resize(situation["left"])
        yield run


def of_steps(run: TorchTrainer) -> list[Any]:
    """Return all that a step can change, on each rank."""

    def look(operator: Any) -> Any:
        optimizer, schedule, scaler = operator.optimizer, operator.schedule, operator._amp_scaler
        models = [*operator.model.state_dict().items(), *operator.slow.state_dict().items()]
        return plain([models, optimizer.state_dict(), schedule.state_dict(), scaler and scaler.state_dict()])

    held = {name: value for name, value in run.state_dict().items() if name == "part_states"}
    return [*run.apply_all_operators(look), plain(held)]


def plain(value: Any) -> Any:
    """Return a state whose parts can be compared, and do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_step_that_ends_with_an_error_was_never_begun(situation: dict[str, Any]) -> None:
    (undisturbed,) = (end(run, situation) for run in begun(situation))
    for run in begun(situation):
        before = of_steps(run)
        run.apply_all_operators(lambda operator: setattr(operator, "breaks", True))
        with pytest.raises(Broken):
            run.train(num_steps=STEPS)
        run.apply_all_operators(lambda operator: setattr(operator, "breaks", False))
        assert of_steps(run) == before
        assert end(run, situation) == undisturbed


def end(run: TorchTrainer, situation: dict[str, Any]) -> list[Any]:
    run.train(num_steps=STEPS)
    return of_steps(run)


@pytest.mark.parametrize("operator", [Everything, Catching])
@pytest.mark.parametrize(
    "situation",
    [{}, {"accumulate": 2}, {"counts": True}, {"on_nonfinite": "skip"}, {"half": True, "precision": "fp16"}],
)
def test_a_step_that_a_peer_interrupts_was_never_begun(
    situation: dict[str, Any], operator: type[TrainingOperator]
) -> None:
    (undisturbed,) = (end(run, situation)[0] for run in begun(situation))
    for run in begun(situation, operator):
        Cluster.running.faults(Fault("kill", "changed", rank=2, step=BEFORE))
        run.train(num_steps=STEPS, max_retries=-1)
        assert not Cluster.running.left and run.world_size == WORKERS - 1
        for rank in of_steps(run)[:-1]:
            assert_close(rank, undisturbed, 1e-3 if "half" in situation else 1e-9)


def assert_close(one: Any, other: Any, rel: float) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_close(*pair, rel)
    else:
        assert one == (pytest.approx(other, rel=rel, abs=rel) if isinstance(one, float) else other)

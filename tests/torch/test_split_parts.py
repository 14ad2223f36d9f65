"""`TrainingOptions(on_oom="split")`: what does not fit into memory is computed in smaller parts, or refused."""

import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from raysgd import ConfigError, ElasticConfig, TrainingOptions
from raysgd.torch import TorchTrainer
from tests.local.group import Cluster
from tests.torch.small import Line, rows


class Small(Line):
    """Has memory for `config["fits"]` rows on rank `config["rank"]`, for any number on others. From the step `config["at"]`
    on, it has that only."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[int] = []  # how many rows each part had
        self.unwrapped().register_forward_pre_hook(self.look)

    def make_model(self) -> nn.Module:
        return nn.Linear(2, 1).double()

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(*(each.double() for each in rows(config.get("rows", 12))))
        return {"train_loader": DataLoader(data, batch_size=config.get("size", 4))}

    def look(self, model: nn.Module, given: tuple[torch.Tensor]) -> None:
        if not self.model.training:
            return
        config, count = self.config, len(given[0])
        small = self.is_first == (config.get("rank", 0) == 0) and self.global_step >= config.get("at", 0)
        if small and count > config.get("fits", 99):
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.seen.append(count)


class Frozen(Small):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1)).double()


class Counts(Small):
    """Its loss is a mean over the rows that count: each third one does not."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        counts = (features[:, 0] * 10).round() % 3 != 0
        self.zero_grad()
        loss = ((self.model(features) - target)[counts] ** 2).sum() / max(int(counts.sum()), 1)
        self.backward(loss, count=int(counts.sum()))
        self.step()
        return {"train_loss": (loss.detach(), int(counts.sum())), "num_samples": len(target)}


class Two(Small):
    """Has two optimizers, whose backward passes come before their steps."""

    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        return [torch.optim.Adam([each], lr=lr) for each in model.parameters()]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        for each in self.optimizer:
            self.step(each)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


RUNS: dict[str, tuple[Any, dict[str, Any], TrainingOptions]] = {
    "SGD": (Small, {"rows": 42}, TrainingOptions()),
    "frozen BatchNorm": (Frozen, {}, TrainingOptions()),
    "counts": (Counts, {}, TrainingOptions()),
    "two optimizers": (Two, {}, TrainingOptions()),
    "windows": (Small, {"rows": 32}, TrainingOptions(accumulate=2)),
    "clipping": (Small, {}, TrainingOptions(clip_norm=0.01, on_nonfinite="skip")),
    "a loss scaler": (Small, {}, TrainingOptions(precision="fp16")),
}


def weights_of(operator: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(operator.unwrapped().parameters()).detach().clone()


def result_of(workers: int, operator: Any, options: TrainingOptions, **config: Any) -> tuple[torch.Tensor, Any, Any]:
    """Train two epochs. Return the weights, what was measured, and the rows of each part on each rank."""
    given: dict[str, Any] = {"num_workers": workers, "use_ray": workers > 1, "use_gpu": False, "seed": 1}
    with TorchTrainer(training_operator_cls=operator, options=options, config=config, **given) as run:
        results = [run.train() for _ in range(2)]
        found = run.apply_all_operators(lambda own: own.seen)
        weights = run.apply_all_operators(weights_of)
    assert torch.equal(weights[0], weights[-1])
    return weights[0], [(each["num_samples"], each["train_loss"]) for each in results], found


def replaced(options: TrainingOptions) -> TrainingOptions:
    return TrainingOptions(**{**vars(options), "on_oom": "split"})


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_a_run_with_enough_memory(name: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    operator, config, options = RUNS[name]
    expected, measured, _ = result_of(1, operator, options, **config)
    weights, split, seen = result_of(1, operator, replaced(options), **config, at=at, fits=1)
    half = 1e-3 if options.precision == "fp16" else 1e-12
    assert torch.allclose(weights, expected, rtol=half, atol=half)
    assert split == [(count, pytest.approx(loss, rel=half)) for count, loss in measured]
    assert max(seen[0]) == (4 if at else 1)
    said = [each.getMessage() for each in caplog.records if "on_oom" in each.getMessage()]
    assert len(said) == 2 and "lets 4 parts share a batch, instead of 2" in said[1]
    assert not any("missing" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("name", ["SGD", "counts", "windows"])
def test_all_ranks_divide_what_does_not_fit_on_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    operator, config, options = RUNS[name]
    with Cluster():
        expected, measured, _ = result_of(2, operator, options, **config)
        weights, split, seen = result_of(2, operator, replaced(options), **config, at=1, rank=1, fits=2)
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-12)
    assert split == [(count, pytest.approx(loss, rel=1e-12)) for count, loss in measured]
    assert max(seen[0][4:]) == max(seen[1][2:]) == 2
    assert "did not fit into memory on rank 1. on_oom='split' lets 4 parts share a batch, instead of 2" in caplog.text


class Normalizes(Small):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()


class Drops(Small):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)).double()


class Remembers(Small):
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.mul_(0.9).add_(x.detach().mean(0))  # type: ignore[operator]
            return x - self.seen

    def make_model(self) -> nn.Module:
        return nn.Sequential(self.Mean(), nn.Linear(2, 1)).double()


class Mixes(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        weight = random.random()
        return super().train_batch((batch[0] * weight, batch[1]), batch_info)


class Keeps(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.part_state["rows"] = len(batch[0])
        return super().train_batch(batch, batch_info)


class Direct(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {"num_samples": len(batch[0])}


class Adversarial(Two):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for each in self.optimizer:
            self.zero_grad(each)
            self.backward(self.criterion(self.model(batch[0]), batch[1]))
            self.step(each)
        return {"num_samples": len(batch[0])}


class WithoutHooks(Small):
    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        inner = super().make_optimizer(model, lr)

        class Own:
            param_groups, step, zero_grad = inner.param_groups, inner.step, inner.zero_grad
            state_dict, load_state_dict = inner.state_dict, inner.load_state_dict

        return Own()


class Batches(Small):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(*(each.double() for each in rows()))
        return {"train_loader": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))}


class Items(Small):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        x, y = (each.double().split(4) for each in rows())
        return {"train_loader": DataLoader(list(zip(x, y, strict=True)), batch_size=None)}  # type: ignore[arg-type]


class Stream(Small):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": [tuple(each.double() for each in rows(4))]}


REFUSED: dict[str, tuple[Any, TrainingOptions, str]] = {
    "BatchNorm": (Normalizes, TrainingOptions(), "BatchNorm in train mode"),
    "a buffer": (Remembers, TrainingOptions(), "the model changes a buffer in its forward pass"),
    "dropout": (Drops, TrainingOptions(), "train_batch draws random numbers"),
    "Python's numbers": (Mixes, TrainingOptions(), "train_batch draws random numbers"),
    "part_state": (Keeps, TrainingOptions(), "self.part_state belongs to a part"),
    "direct steps": (Direct, TrainingOptions(), r"train_batch calls optimizer.step\(\) itself"),
    "a GAN": (Adversarial, TrainingOptions(), "makes a backward pass after a step"),
    "no hooks": (WithoutHooks, TrainingOptions(), "Own has no register_step_pre_hook"),
    "a batch sampler": (Batches, TrainingOptions(), "the loader has a batch sampler, or no batches"),
    "whole batches": (Items, TrainingOptions(), "the loader has a batch sampler, or no batches"),
    "a stream": (Stream, TrainingOptions(), "this kind of data is not divided by index"),
    "means of ranks": (Small, TrainingOptions(gradients="ranks"), "gradients='ranks' is not a mean over samples"),
    "own averages": (Small, TrainingOptions(parallel=None), "the operator averages the gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_smaller_parts_would_change_is_refused_in_the_first_step(name: str) -> None:
    operator, options, says = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s)on_oom='split' needs .*, but .*{says}.*leave on_oom out"):
        result_of(1, operator, replaced(options))


EXCLUDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shares deal the parts": ({}, {"parts": 4, "elastic": ElasticConfig(shares="speed")}),
    "a worker's batch is not divided": ({}, {"elastic": ElasticConfig(batch="per_worker")}),
    "leaves it gathered": ({"parallel": "fsdp"}, {}),
    "where torch averages": ({}, {"backend": "horovod"}),
}


@pytest.mark.parametrize("says", EXCLUDED)
def test_arguments_that_exclude_it(says: str) -> None:
    options, given = EXCLUDED[says]
    with pytest.raises(ConfigError, match=says):
        TorchTrainer(
            training_operator_cls=Line, use_gpu=False, options=TrainingOptions(on_oom="split", **options), **given
        )


class DropsLater(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        noise = torch.rand(()) if self.global_step else 0.0
        return super().train_batch((batch[0] + noise, batch[1]), batch_info)


def test_random_numbers_of_later_steps_are_no_error_while_the_memory_suffices() -> None:
    weights, *_ = result_of(1, DropsLater, TrainingOptions(on_oom="split"))
    assert torch.equal(weights, result_of(1, DropsLater, TrainingOptions())[0])


@pytest.mark.parametrize("size", [3, 6])
def test_a_batch_is_divided_until_a_part_has_one_row(size: int) -> None:
    expected, *_ = result_of(1, Small, TrainingOptions(), size=size)
    weights, _, seen = result_of(1, Small, TrainingOptions(on_oom="split"), size=size, fits=1)
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-12) and max(seen[0]) == 1


class StepsTooLarge(Line):
    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        class Large(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return Large(model.parameters(), lr=lr)


ENDS = {
    "an optimizer had begun its step": (StepsTooLarge, {}),
    "a part has one row": (Small, {"fits": 0}),
    "train_batch draws random numbers": (DropsLater, {"fits": 3, "at": 1}),
}


@pytest.mark.parametrize("reason", ENDS)
def test_errors_after_which_a_part_is_not_divided(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    operator, config = ENDS[reason]
    with pytest.raises(torch.OutOfMemoryError):
        result_of(1, operator, TrainingOptions(on_oom="split"), **config)
    assert f"does not divide the parts of this batch, which does not fit into memory: {reason}" in caplog.text


class Holds(Small):
    """Notes which of its locals are in memory."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        held = nn.Identity()
        self.held = weakref.ref(held)
        return super().train_batch(batch, batch_info)


def test_what_a_failed_part_has_computed_is_freed_before_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options, given = TrainingOptions(on_oom="split"), {"use_gpu": False, "use_ray": False}
    with TorchTrainer(training_operator_cls=Holds, options=options, config={"fits": 2}, **given) as run:
        held: list[Any] = []
        operator: Any = run.get_local_operator()
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(operator.held()))
        run.train()
    assert held == [None]

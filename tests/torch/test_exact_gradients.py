"""A step's gradient is the mean over its samples, whatever each rank's share: one worker and N end with equal weights."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from raysgd.core.decisions.sampling_plan import SamplingPlan
from raysgd.data import RayData
from raysgd.ray_data.dealer import Dealer, PartRequest
from raysgd.torch import TrainingOperator
from tests.local.runs import train
from tests.peek import parts_of, weighs_arriving_gradients
from tests.ray_data.test_rows import Blocks
from tests.replicas import torch_rank

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")


class Curve(TrainingOperator):
    """A small model in double precision, so that rounding cannot hide a wrong weight."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        if config.get("adam"):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=self.loss(), schedulers=schedule
        )
        x = torch.randn(config["rows"], 3, generator=torch.Generator().manual_seed(7)).double()
        self.register_data(train_loader=self.loader(TensorDataset(x, (3 * x).sin().sum(1, keepdim=True)), config))

    def loss(self) -> Any:
        return nn.MSELoss()

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        return DataLoader(data, batch_size=config["batch"])


class Direct(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(x)}


class TwoPasses(Curve):
    """Runs two backward passes for each step, and clears the gradients at the end."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        (0.5 * self.criterion(self.model(x), y)).backward()
        (0.5 * self.criterion(self.model(-x), y)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {}


class Sampled(Curve):
    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        sizes, batches, start = [1, 4, 2, 3], [], 0
        while start < len(data):
            size = config["batch"] * sizes[len(batches) % 4]
            batches.append(list(range(start, min(start + size, len(data)))))
            start += size
        return DataLoader(data, batch_sampler=batches)


KINDS: dict[str, type[Curve]] = {"helpers": Curve, "direct": Direct, "two passes": TwoPasses}
OPTIONS = st.sampled_from([{}, {"clip_norm": 0.05}, {"clip_value": 0.01}])


def options(**given: Any) -> TrainingOptions:
    return TrainingOptions(parallel="ddp", **given)


def close(mine: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(2, 5), st.sampled_from([*KINDS]), OPTIONS, st.booleans())
def test_one_worker_and_several_end_with_equal_weights(
    rows: int, batch: int, workers: int, kind: str, more: dict[str, Any], adam: bool
) -> None:
    config, more = {"rows": rows, "batch": batch, "adam": adam}, more if kind == "helpers" else {}
    several = train(KINDS[kind], config, [(None, workers)], options=options(**more))
    config["batch"] *= workers
    close(several, train(KINDS[kind], config, [(None, 1)], options=options(**more)))


def test_batches_of_a_batch_sampler_count_by_their_samples() -> None:
    config = {"rows": 23, "batch": 1}  # batches of 1, 4, 2, 3, 1, 4, 2, 3, 1, 2 rows
    sizes = [1 + 4, 2 + 3, 1 + 4, 2 + 3, 1 + 2]
    batches = [list(range(sum(sizes[:step]), sum(sizes[: step + 1]))) for step in range(5)]

    class Whole(Curve):
        def loader(self, data: Any, config: dict[str, Any]) -> Any:
            return DataLoader(data, batch_sampler=batches)

    close(train(Sampled, config, [(None, 2)]), train(Whole, config, [(None, 1)]))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(2, 5), st.booleans())
@example(11, 2, 3, False)
def test_gradients_ranks_is_the_mean_of_their_means(rows: int, batch: int, workers: int, adam: bool) -> None:
    config = {"rows": rows, "batch": batch, "adam": adam}
    means = train(Curve, config, [(None, workers)], options=options(gradients="ranks"))
    parts = torch_rank(Curve, config, scheduler_step_freq="batch").operator
    data = parts_of(parts).train_loader.dataset
    plan = SamplingPlan(rows, batch * workers, parts=workers, world_size=workers)
    for offset in range(0, rows, batch * workers):
        losses = [
            parts.criterion(parts.model(x), y)
            for x, y in (data[p.start : p.stop] for rank in range(workers) for p in plan.of_rank(rank, offset))
        ]
        parts.optimizer.zero_grad()
        (sum(losses) / workers).backward()
        parts.optimizer.step()
        parts.schedule.step()
    close(means, nn.utils.parameters_to_vector(parts.model.parameters()).detach())
    if (rows, batch, workers) == (11, 2, 3):
        assert not torch.allclose(means, train(Curve, config, [(None, 3)]), rtol=1e-3), (
            "the shares of the last step differ"
        )


class Rows:
    """Replaces a Ray Dataset and its reader. The real dealer divides the rows, which are in blocks of three."""

    def __init__(self, data: TensorDataset) -> None:
        self._x, self._y = (tensor.numpy() for tensor in data.tensors)
        self._dealer = Dealer(pickle.dumps(Blocks(*[3] * (len(data) // 3), len(data) % 3)))

    def read(self, rank_info: Any, *, call: int, number: Any, start: int, step: int, pad: bool, keep: int) -> Any:
        turn, rank, ranks = (call, rank_info.generation), rank_info.world_rank, rank_info.world_size
        request = PartRequest(number, start, step, rank, ranks, turn, pad, floor=start)
        while (dealt := self._dealer.take(request)) is not None:
            mine = [row for block, begin, end in dealt.slices for row in block[begin:end]]
            yield {"x": self._x[mine], "y": self._y[mine]}, dealt.after, dealt.fresh
            request = replace(request, start=dealt.after, floor=start)


class OfRows(Curve):
    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        return RayData(Rows(data), batch_size=config["batch"], features="x", target="y")

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch([each.double() for each in batch], batch_info)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 5), OPTIONS)
def test_rows_of_a_ray_dataset(rows: int, batch: int, workers: int, more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"options": options(**more), "rows": lambda name, dataset, deliver: dataset}
    config = {"rows": rows, "batch": batch}
    alone = train(OfRows, {**config, "batch": batch * workers}, [(None, 1)], **given)
    close(train(OfRows, config, [(None, workers)], **given), alone)


def test_where_shares_are_equal_no_parameter_has_a_hook() -> None:
    seen: list[bool] = []

    class Looks(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if self.world_rank == 0:
                seen.append(weighs_arriving_gradients(self))
            return super().train_batch(batch, batch_info)

    train(Looks, {"rows": 13, "batch": 2}, [(None, 3)])
    assert seen == [False, False, True]


def test_a_frozen_layer_that_a_batch_unfreezes_is_weighted() -> None:
    class Thaws(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            for parameter in self.model[0].parameters():
                parameter.requires_grad_(True)
            result = super().train_batch(batch, batch_info)
            for parameter in self.model[0].parameters():
                parameter.requires_grad_(False)
            return result

    close(train(Thaws, {"rows": 11, "batch": 2}, [(None, 2)]), train(Curve, {"rows": 11, "batch": 4}, [(None, 1)]))


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_that_are_taken_inside_a_batch_have_no_weight(direct: bool) -> None:
    """As the inner step of MAML: the outer loss is not linear in it."""

    class Inner(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            losses = []
            for x, y in zip(*batch, strict=True):  # tasks of one row
                weights = dict(self.unwrapped().named_parameters())
                first = self.criterion(self.model(x), y)
                taken = torch.autograd.grad(first, list(weights.values()), create_graph=True)
                moved = {name: each - 0.1 * g for (name, each), g in zip(weights.items(), taken, strict=True)}
                losses.append(self.criterion(torch.func.functional_call(self.unwrapped(), moved, (x,)), y))
            self.zero_grad()
            loss = torch.stack(losses).mean()
            loss.backward() if direct else self.backward(loss)
            self.step()
            return {}

    close(train(Inner, {"rows": 11, "batch": 2}, [(None, 3)]), train(Inner, {"rows": 11, "batch": 6}, [(None, 1)]))


@pytest.mark.parametrize("direct", [False, True])
def test_samples_that_a_rank_repeats_contribute_nothing(direct: bool) -> None:
    """Also if what is computed with them alone is not a number."""

    class Repeats(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.zero_grad()
            loss = self.criterion(self.model(batch[0]), batch[1])
            if self.world_rank > 0 and len(batch[0]) == 1:
                loss = loss * float("nan")
            loss.backward() if direct else self.backward(loss)
            self.step()
            return {}

    close(train(Repeats, {"rows": 13, "batch": 2}, [(None, 3)]), train(Curve, {"rows": 13, "batch": 6}, [(None, 1)]))


class Rescales(Curve):
    def resized(self, old_world_size: int, new_world_size: int) -> None:
        self.optimizer.param_groups[0]["lr"] *= new_world_size / old_world_size


def test_batches_of_workers_with_a_rate_that_resized_chooses() -> None:
    mine = train(Rescales, {"rows": 44, "batch": 2}, [(2, 4), (2, 2), (1, 6), (None, 4)])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(44, 3, generator=torch.Generator().manual_seed(7)).double()
    y, start, rate = (3 * x).sin().sum(1, keepdim=True), 0, 0.2
    for workers in [4, 4, 2, 2, 6, 4]:
        optimizer.param_groups[0]["lr"] = rate * workers / 4
        optimizer.zero_grad()
        rows = slice(start, start + 2 * workers)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        start, rate = rows.stop, rate * 0.9
    close(mine, nn.utils.parameters_to_vector(model.parameters()).detach())


def test_a_loss_that_is_a_sum_is_refused() -> None:
    class Sums(Curve):
        def loss(self) -> Any:
            return nn.MSELoss(reduction="sum")

    with pytest.raises(ConfigError, match=r"MSELoss sums over the batch.*gradients='ranks'"):
        train(Sums, {"rows": 4, "batch": 2}, [(None, 2)])
    train(Sums, {"rows": 4, "batch": 2}, [(None, 2)], options=options(gradients="ranks"))


def test_gradients_has_two_values() -> None:
    with pytest.raises(ConfigError, match="gradients must be 'samples' or 'ranks', got 'mean'"):
        TrainingOptions(gradients="mean")  # type: ignore[arg-type]

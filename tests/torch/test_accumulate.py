"""Accumulated batches lead to the same weights as one batch with all their samples, in every precision."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from tests.torch.small import Line, inline, operator_of, set_scale, weights


class Deep(Line):
    """A model that is large enough for clipping to matter, with data that cannot be divided evenly. Counts its steps."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"seed": 5, "lr": 0.03, **config})
        self.steps = 0
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "steps", self.steps + 1))

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        x = torch.randn(config.get("rows", 22), 3)
        return {"train_loader": self.loader(TensorDataset(x, 5 * x.sum(1, keepdim=True)), config["batch"])}

    def loader(self, data: Any, batch: int) -> Any:
        return DataLoader(data, batch_size=batch)


class Streaming(Deep):
    """Batches of a plain iterable, whose end is not known in advance."""

    def loader(self, data: Any, batch: int) -> Any:
        return list(DataLoader(data, batch_size=batch))


def trained(kind: type[Deep] = Deep, *, calls: Any = (None, None), **arguments: Any) -> tuple[torch.Tensor, Any]:
    with inline(kind, **arguments) as trainer:
        set_scale(trainer, 64.0)
        results = [trainer.train(num_steps=steps) for steps in calls]
        return weights(trainer), (results[-1], operator_of(trainer).steps)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Deep, {}),
        (Deep, {"clip_norm": 0.5}),
        (Streaming, {"clip_value": 0.1}),
        (Streaming, {"clip_norm": 1.0, "clip_value": 0.2}),
    ],
)
@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-6), ("fp16", 3e-3), ("bf16", 3e-2)])
def test_four_accumulated_batches_equal_one_of_four_times_the_size(
    kind: type[Deep], more: dict[str, Any], precision: Any, close: float
) -> None:
    small, (result, steps) = trained(
        kind, config={"batch": 2}, options=TrainingOptions(accumulate=4, precision=precision, **more)
    )
    large, (expected, _) = trained(kind, config={"batch": 8}, options=TrainingOptions(precision=precision, **more))
    plain, _ = trained(kind, config={"batch": 8}, options=TrainingOptions(precision=precision))
    assert torch.allclose(small, large, atol=close), (small - large).abs().max()
    assert steps == 6  # 22 rows: two full windows and a short one, in each of two epochs
    assert (result["batch_count"], result["num_samples"]) == (11, 22)
    assert result["train_loss"] == pytest.approx(expected["train_loss"], rel=10 * close)
    assert not more or not torch.allclose(plain, large, atol=close)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_under_fp16_equals_a_plain_loop(accumulate: int) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    x = torch.randn(22, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    batches = list(zip(x.split(2), (5 * x.sum(1, keepdim=True)).split(2), strict=True))
    windows = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    for window in [*windows, *windows]:  # the last one of an epoch is shorter
        optimizer.zero_grad()
        for rows, target in window:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(rows), target)
            scaler.scale(loss / len(window)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    ours, _ = trained(
        config={"batch": 2}, options=TrainingOptions(precision="fp16", clip_norm=0.5, accumulate=accumulate)
    )
    by_hand = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(ours, by_hand) if accumulate == 1 else torch.allclose(ours, by_hand, atol=1e-4)


def test_a_call_that_ends_in_a_window_closes_it() -> None:
    ours, (result, steps) = trained(config={"batch": 2}, options=TrainingOptions(accumulate=4), calls=[6, 5])
    assert steps == 2 + 2 and result["batch_count"] == 5
    by_hand, _ = trained(config={"batch": 2}, options=TrainingOptions(accumulate=11), calls=[4, 2, 4, 1])
    assert torch.allclose(ours, by_hand, atol=1e-6)


class Shared(Deep):
    """Has two optimizers that step the same layer."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(5)
        model = self.make_model()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, model[2])]  # type: ignore[index]
        self.model, self.pair = self.register(models=model, optimizers=optimizers)
        self.register_data(**self.loaders(config))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.backward((self.model(batch[0]) - batch[1]).pow(2).mean())
        for optimizer in self.pair:
            self.step(optimizer)
        return {}


def test_a_shorter_window_counts_a_shared_parameter_once() -> None:
    found = []
    for batch, accumulate in ((22, 1), (8, 4)):
        with inline(Shared, config={"batch": batch}, options=TrainingOptions(accumulate=accumulate)) as trainer:
            trainer.train()
            found.append(weights(trainer))
    torch.testing.assert_close(*found)


class Own(Deep):
    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        for x, y in iterator:
            self.zero_grad()
            with self.autocast():
                loss = self.criterion(self.model(x), y)
            self.backward(loss)
            self.step()
        return {}


def test_a_custom_loop_with_the_helpers() -> None:
    ours, (_, steps) = trained(Own, config={"batch": 2}, options=TrainingOptions(accumulate=4))
    assert steps == 6
    assert torch.allclose(ours, trained(config={"batch": 8})[0], atol=1e-6)


class FailsOnce(Deep):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] == 6 and not hasattr(self, "failed"):
            self.failed = True
            raise ZeroDivisionError("in the middle of a window")
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("base", [Deep, Streaming])
def test_an_error_in_a_window_repeats_the_whole_window(base: type[Deep]) -> None:
    kind = type("Fails", (FailsOnce, base), {})
    with inline(kind, config={"batch": 2}, options=TrainingOptions(accumulate=4)) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        state = trainer.state_dict()
        assert (operator_of(trainer).steps, state["global_step"], state["position"]["step"]) == (1, 4, 4)
        assert operator_of(trainer).global_step == 4, "the two batches of the window are undone"
        trainer.train()
        trainer.train()
        assert operator_of(trainer).steps == 6
        assert torch.allclose(weights(trainer), trained(base, config={"batch": 8})[0], atol=1e-6)


PARTS = [(0, 3), (3, 8), (8, 9), (9, 22)]


class InDictionaries(Deep):
    """Its batches have different sizes."""

    def loader(self, data: Any, batch: int) -> Any:
        x, y = data.tensors
        return [{"note": "text", "x": x[start:end], "rest": ("ids", y[start:end])} for start, end in PARTS]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch((batch["x"], batch["rest"][1]), batch_info)


class InWindows(Deep):
    def loader(self, data: Any, batch: int) -> Any:
        return [data[:8], data[8:]]


def test_batches_in_dictionaries_count_by_their_samples() -> None:
    ours, _ = trained(InDictionaries, config={"batch": 0}, options=TrainingOptions(accumulate=2))
    assert torch.allclose(ours, trained(InWindows, config={"batch": 0})[0], atol=1e-6)


class OwnBackward(Deep):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.step()
        return {}


def test_backward_passes_that_are_not_scaled_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulate=4 acts in self.backward\(loss\), and this operator calls loss"):
        trained(OwnBackward, config={"batch": 4}, options=TrainingOptions(accumulate=4))


class SameMemory(Line):
    """Returns a number in memory that the next batch overwrites."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.first, self.pair = torch.zeros(()), (torch.zeros(()), 1)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for own in (self.first, self.pair[0]):
            own.copy_(batch[0][0, 0])
        return {**super().train_batch(batch, batch_info), "first": self.first, "pair": self.pair}


@pytest.mark.parametrize("batches", [1, 3])
def test_metrics_of_a_window_are_those_of_each_batch(batches: int) -> None:
    with inline(SameMemory, options=TrainingOptions(accumulate=batches)) as trainer:
        result = trainer.train()
    assert (result["first"], result["pair"]) == (pytest.approx(0.4), pytest.approx(0.4))

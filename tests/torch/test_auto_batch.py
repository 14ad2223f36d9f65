"""`ElasticConfig(batch="auto")`: after a worker is lost, a run ends with what an undisturbed one has, or the log says why not."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from raysgd.torch.buffers import KeepBuffers
from raysgd.torch.parts import sums_of
from tests.local.group import Cluster, Fault
from tests.local.runs import train, weights_of
from tests.replicas import torch_rank
from tests.tiers import NIGHTLY
from tests.torch.test_constant_batch import STAGES, StepsItsSchedule, in_stages
from tests.torch.test_exact_gradients import OPTIONS, Curve, Direct, close, options

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")

WORKERS = 3
CONFIG = {"rows": 40, "batch": 3}  # five steps of three workers


@settings(max_examples=200 if NIGHTLY else 12, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(2, 5), STAGES, st.integers(1, 6), OPTIONS)
def test_any_schedule_ends_with_the_weights_of_an_undisturbed_run(
    rows: int, batch: int, workers: int, stages: Any, last: int, more: dict[str, Any]
) -> None:
    """The first step has all workers: it shows what the code does."""
    config, given = {"rows": rows, "batch": batch}, {"num_workers": workers, "options": options(**more)}
    steps = -(-rows // (batch * workers))
    schedule = in_stages([(1, workers), *stages], last, steps) if steps > 1 else [(None, workers)]
    mine = train(Curve, config, schedule, batch="auto", **given)
    close(mine, train(Curve, config, [(None, workers)], batch="auto", **given))


class Outcome:
    """What a run of two epochs has left, in which a worker fails and is not replaced."""

    def __init__(
        self, kind: type[TrainingOperator], *faults: Fault, config: dict[str, Any] = CONFIG, **given: Any
    ) -> None:
        elastic = ElasticConfig(grow=False, **given.pop("elastic", {}))
        given = {"scheduler_step_freq": "batch", "use_gpu": False, "num_workers": WORKERS, **given}
        with (
            Cluster(faults) as cluster,
            TorchTrainer(training_operator_cls=kind, config=config, elastic=elastic, **given) as trainer,
        ):
            assert trainer.batch_mode in (None, "global", "per_worker")
            self.results = [trainer.train(max_retries=-1), trainer.train()]
            assert len(cluster.left) == 0 and trainer.world_size == given["num_workers"] - len(faults)
            self.mode, self.weights = trainer.batch_mode, weights_of(trainer)
            self.reasons = [each.reason for each in trainer.recoveries]
            self.operator: Any = trainer.get_local_operator()
            buffers = trainer.apply_all_operators(lambda operator: list(operator._parts.models[0].buffers()))
            self.buffers = buffers[0]
            for each in buffers[1:]:
                assert all(map(torch.equal, self.buffers, each)), "all ranks have the same ones"
            self.rates = [group["lr"] for group in self.operator.optimizer.param_groups]

    def assert_equals(self, other: "Outcome") -> None:
        close(self.weights, other.weights)
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            close(mine, theirs)
        assert self.rates == other.rates
        for mine, theirs in zip(self.results, other.results, strict=True):
            for name in {"num_samples", "batch_count", "epoch"} & theirs.keys():
                assert mine[name] == theirs[name]
        # Without what the failed worker had measured since its last message, which is lost.
        assert self.results[1]["train_loss"] == pytest.approx(other.results[1]["train_loss"], rel=1e-9)


KILL = Fault("kill", "forward", rank=1, step=3)
ONE, TWO = (KILL,), (KILL, Fault("kill", "reduced", rank=1, step=4))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "keeps its batch size" in each]


@pytest.mark.parametrize("faults", [ONE, TWO])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"options": TrainingOptions(accumulate=2, clip_norm=0.1)},
        {"options": TrainingOptions(on_nonfinite="skip")},
        {"scheduler_step_freq": "epoch"},
    ],
)
def test_a_worker_that_is_not_replaced_changes_nothing(
    given: dict[str, Any], faults: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Outcome(Curve, *faults, **given)
    mine.assert_equals(Outcome(Curve, **given))
    assert mine.mode == "global" and not said(caplog)


class Halves(Curve):
    """Has two optimizers, with one backward pass for both."""

    def register(self, *, models: Any, **parts: Any) -> Any:
        parts["optimizers"] = [torch.optim.SGD(models[0].parameters(), lr=0.2, momentum=0.9)]
        parts["optimizers"].append(torch.optim.Adam(models[2].parameters(), lr=0.02))
        parts["schedulers"] = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in parts["optimizers"]]
        model, self.optimizers, *rest = super().register(models=models, **parts)
        return model, self.optimizers[0], *rest

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for optimizer in self.optimizers:
            self.zero_grad(optimizer)
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        for optimizer in self.optimizers:
            self.step(optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


@pytest.mark.parametrize("faults", [ONE, TWO])
def test_optimizers_that_share_a_backward_pass_keep_the_batch(faults: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = Outcome(Halves, *faults)
    mine.assert_equals(Outcome(Halves))
    assert mine.mode == "global" and not said(caplog)
    steps = 2 * -(-CONFIG["rows"] // (CONFIG["batch"] * WORKERS))
    rates = [each.param_groups[0]["lr"] for each in mine.operator.optimizers]
    assert rates == [pytest.approx(lr * 0.9**steps) for lr in (0.2, 0.02)], "each schedule steps once in a step"


class Normed(Curve):
    """Has BatchNorm layers, and a buffer that its forward replaces."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(5).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x

    def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
        torch.manual_seed(3)
        models = nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), self.Running(), nn.Tanh(), nn.Linear(5, 1), nn.BatchNorm1d(1)
        ).double()
        optimizers = torch.optim.SGD(models.parameters(), lr=0.2, momentum=0.9)
        parts["schedulers"] = torch.optim.lr_scheduler.ExponentialLR(optimizers, 0.9)
        return super().register(models=models, optimizers=optimizers, **parts)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", ["forward", "reduced", "sends", "applied"])
@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_running_statistics_are_those_of_the_first_part(
    workers: int, rank: int, at: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the batch in which the worker failed was trained again, whichever it was."""
    original = KeepBuffers._send_together

    def send(self: KeepBuffers, held: Any) -> None:
        Cluster.running.point("sends")
        original(self, held)

    monkeypatch.setattr(KeepBuffers, "_send_together", send)
    given: dict[str, Any] = {"num_workers": workers, "options": TrainingOptions(accumulate=accumulate)}
    mine = Outcome(Normed, Fault("kill", at, rank=rank, step=3), config={"rows": 36, "batch": 3}, **given)
    other = Outcome(Normed, config={"rows": 36, "batch": 3}, **given)
    mine.assert_equals(other)
    assert mine.mode == "global"
    assert mine.results[1]["last_train_loss"] == pytest.approx(other.results[1]["last_train_loss"], rel=1e-9)


class Growing(Curve):
    """Has a buffer that grows, and one that its first forward pass registers."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("means", torch.zeros(1).double(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                if not hasattr(self, "total"):
                    self.register_buffer("total", torch.zeros(()).double(), persistent=False)
                self.total += x.detach().sum()
                self.means = torch.cat([self.means, x.detach().mean().reshape(1)])
            return x

    def register(self, *, models: Any, **parts: Any) -> Any:
        models.append(self.Cache())
        return super().register(models=models, **parts)


@pytest.mark.parametrize("at", ["forward", "reduced"])
def test_buffers_that_user_code_replaces_or_adds_follow_the_first_rank(at: str) -> None:
    given: dict[str, Any] = {"num_workers": 2, "config": {"rows": 36, "batch": 3}}
    mine = Outcome(Growing, Fault("kill", at, rank=1, step=3), **given)
    mine.assert_equals(Outcome(Growing, **given))
    assert mine.mode == "global" and [each.numel() for each in mine.buffers] == [13, 1]


class Warm(Curve):
    """Computes its learning rate from the number of the step."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 * (1 + batch_info["global_step"])
        return super().train_batch(batch, batch_info)


class Numbered(Curve):
    """Computes with the number of the batch in the call."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch((batch[0] * (1 + batch_info["batch_idx"]), batch[1]), batch_info)


class Hooked(Curve):
    """Averages weights in a hook, and trains towards them."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ema = torch.optim.swa_utils.AveragedModel(copy.deepcopy(self.unwrapped()))
        self.optimizer.register_step_post_hook(lambda *_: self.ema.update_parameters(self.unwrapped()))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            target = 0.9 * batch[1] + 0.1 * self.ema(batch[0])
        return super().train_batch((batch[0], target), batch_info)


class Losing(Curve):
    """Its loss is not a mean over samples, and its gradients are clipped as they arrive."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    def loss(self) -> Any:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            counted = (target > 0).double() + 0.1  # as the tokens of each sample that are not padding
            return (counted * (output - target) ** 2).sum() / counted.sum() + output.std(correction=0)

        return loss


class Clamping(Curve):
    """Clamps gradients as they arrive, with hooks of this batch only."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        hooks = [each.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05)) for each in self.model.parameters()]
        result = super().train_batch(batch, batch_info)
        for each in hooks:
            each.remove()
        return result


@pytest.mark.parametrize("kind", [Warm, Numbered, Hooked, Losing, Clamping])
@pytest.mark.parametrize("faults", [ONE, TWO])
def test_code_that_computes_with_a_batch_as_each_worker_has_it(
    kind: type[Curve], faults: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"scheduler_step_freq": "manual"}
    mine = Outcome(kind, *faults, **given)
    mine.assert_equals(Outcome(kind, **given))
    assert mine.mode == "global" and not said(caplog)


class Measuring(Curve):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        torchmetrics = pytest.importorskip("torchmetrics")
        squared = torchmetrics.MeanSquaredError()
        self.errors = self.register_metrics(train=torchmetrics.MetricCollection({"squared": squared}))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.errors["squared"].update(self.model(batch[0]).detach().float(), batch[1].float())
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("faults", [ONE, TWO])
def test_registered_metrics_leave_out_repeated_pieces(faults: Any) -> None:
    """Two workers process three parts in two rounds."""
    mine, other = Outcome(Measuring, *faults), Outcome(Measuring)
    mine.assert_equals(other)
    assert mine.results[1]["squared"] == pytest.approx(other.results[1]["squared"], rel=1e-5)


class Centered(Curve):
    """Subtracts a mean that it follows, at a step from which on it does, and notes it before each batch."""

    at = 0

    class Center(nn.Module):
        follows = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, 5).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centered = x - self.mean
            if self.training and self.follows:
                self.mean.lerp_(x.detach().mean(0, keepdim=True), 0.2)
            return centered

    def register(self, *, models: Any, **parts: Any) -> Any:
        self.center = self.Center()
        models.insert(1, self.center)
        return super().register(models=models, **parts)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.center.follows = batch_info["global_step"] >= self.at
        if self.world_rank == 0:
            Cluster.running.notes.append((batch_info["global_step"], batch_info["piece"], self.center.mean.tolist()))
        return super().train_batch(batch, batch_info)


def test_each_piece_begins_with_the_buffers_of_the_batch() -> None:
    """A model may compute with its buffers, as spectral normalization does."""
    given: dict[str, Any] = {"config": CONFIG, "num_workers": WORKERS, "use_gpu": False, "scheduler_step_freq": "batch"}
    elastic = ElasticConfig(grow=False)
    with Cluster(ONE) as cluster, TorchTrainer(training_operator_cls=Centered, elastic=elastic, **given) as trainer:
        trainer.train(max_retries=-1)
        assert trainer.batch_mode == "global"
        found = {(step, piece): mean for step, piece, mean in cluster.notes}
    assert (4, 1) in found and found[4, 0] == found[4, 1] != found[3, 0]


def test_buffers_that_begin_to_change_later(caplog: pytest.LogCaptureFixture) -> None:
    late = type("Late", (Centered,), {"at": 4})
    mine = Outcome(late, *ONE)
    mine.assert_equals(Outcome(late))
    assert mine.mode == "global" and not said(caplog)


class Holding(Curve):
    """Has attributes at which one cannot look in the usual way, and data that counts what is read."""

    class Unsized:
        def __len__(self) -> int:
            raise TypeError("it has no length")

    class Counting(Dataset[Any]):
        def __init__(self, data: Any) -> None:
            self.data, self.read = data, 0

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return self.data[index]

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.unsized = self.Unsized()
        with torch.inference_mode():
            self.inferred = torch.ones(2)

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        self.counting = self.Counting(data)
        return super().loader(self.counting, config)


def test_a_look_at_attributes_changes_nothing() -> None:
    mine = Outcome(Holding, *ONE)
    mine.assert_equals(Outcome(Holding))
    assert mine.mode == "global"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 4), (300, 300)])
def test_a_sum_changes_with_the_elements(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype).transpose(0, -1) if shape else None):
        if tensor is not None:
            before = sums_of([tensor, tensor])
            tensor.data.add_(torch.ones((), dtype=dtype))
            assert before[0] == before[1] != sums_of([tensor])[0]


def test_other_tensors_have_a_sum_too() -> None:
    numbers = torch.randn(2, dtype=torch.complex64)
    expanded, sparse = torch.ones(1).expand(1 << 40), torch.eye(3).to_sparse()
    others = [torch.ones(3, device="meta"), torch.empty(0), sparse, numbers.conj(), numbers.conj().imag]
    assert sums_of([expanded, *others]) == [sums_of([torch.ones(1)])[0], 0, 0, 0, 0, 0]


# -- what cannot be exact ------------------------------------------------------------------------------


class Counting(Curve):
    seen = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen += 1
        return super().train_batch(batch, batch_info)


class Averaging(Curve):
    """Averages the weights by hand."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ema = torch.optim.swa_utils.AveragedModel(self.unwrapped())

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        self.ema.update_parameters(self.unwrapped())
        return result


class AveragingData(Averaging):
    """Changes `.data`, which torch does not count."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = Curve.train_batch(self, batch, batch_info)
        for mine, other in zip(self.ema.parameters(), self.model.parameters(), strict=False):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        return result


class Slotted(Curve):
    @dataclass(slots=True)
    class Seen:
        batches: int = 0

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen = self.Seen()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.batches += 1
        return super().train_batch(batch, batch_info)


class Harder(Curve):
    """Changes the data set, which the next batch or piece shows."""

    class Scaled(Dataset[Any]):
        scale = 1.0

        def __init__(self, data: Any) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            x, y = self.data[index]
            return x * self.scale, y

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        self.data = self.Scaled(data)
        return super().loader(self.data, config)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.data.scale = 1 + batch_info["global_step"] / 10
        return super().train_batch(batch, batch_info)


class Calls(nn.Tanh):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)


class CountingModel(Curve):
    def register(self, *, models: Any, **parts: Any) -> Any:
        models[1] = Calls()
        return super().register(models=models, **parts)


class Moved(nn.Tanh):
    """Follows a mean that it keeps in a tensor that is not a buffer. Another one it makes in its first call."""

    follows = True

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "zeros"):
            self.zeros = torch.zeros_like(self.mean)
        if self.training and self.follows:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean + self.zeros)


class MovedModel(Curve):
    follows = True

    def register(self, *, models: Any, **parts: Any) -> Any:
        models[1] = Moved()
        models[1].follows = self.follows
        return super().register(models=models, **parts)


def test_a_tensor_that_a_model_makes_in_its_first_call_changes_nothing() -> None:
    kind = type("Still", (MovedModel,), {"follows": False})
    mine = Outcome(kind, *ONE)
    mine.assert_equals(Outcome(kind))
    assert mine.mode == "global"


class Following(Curve):
    """A second registered model follows the weights of the first one, by hand."""

    def register(self, *, models: Any, **parts: Any) -> Any:
        self.target = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double().requires_grad_(False)
        (model, _), *rest = super().register(models=[models, self.target], **parts)
        return model, *rest

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        return result


class Annealed(Curve):
    """Its loss counts its calls."""

    class Loss(nn.MSELoss):
        calls = 0

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(output, target)

    def loss(self) -> Any:
        return self.Loss()


class Configured(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.config["seen"] = self.config.get("seen", 0) + 1
        return super().train_batch(batch, batch_info)


class Scaled(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch((batch[0] * self.world_size, batch[1]), batch_info)


class Unlabelled(Curve):
    """Draws a second batch from an iterator."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.more = itertools.cycle([1.0, 2.0])

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch((next(self.more) * batch[0], batch[1]), batch_info)


class Clearing(Curve):
    """Clears the gradients with torch's zero_grad."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


class Looping(Curve):
    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        losses = [self.train_batch(batch, {})["train_loss"] for batch in iterator]
        return {"train_loss": float(sum(losses)) / max(len(losses), 1)}


class Skipping(Curve):
    """Leaves out each third batch, by its own count."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        kept = (batch for number, batch in enumerate(iterator) if number % 3 != 2)
        return super().train_epoch(kept, info, num_steps, epoch_idx)


class Resizing(Curve):
    def resized(self, old_world_size: int, new_world_size: int) -> None:
        """Does nothing, which no check can know."""


class Streaming(Curve):
    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        return [data[start : start + 3] for start in range(0, 12, 3)]


class Numbering(Curve):
    """Has a loader that scales each batch by its number."""

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((x / (1 + number), y) for number, (x, y) in enumerate(super().__iter__()))

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        return self.Loader(data, batch_size=config["batch"])


REFUSED: dict[str, tuple[type[Curve], dict[str, Any], str]] = {
    "a direct step": (Direct, {}, "calls optimizer.step() itself"),
    "a direct zero_grad": (Clearing, {}, "calls self.backward(), self.step()"),
    "a scheduler": (StepsItsSchedule, {"scheduler_step_freq": "manual"}, "steps a scheduler"),
    "a counter": (Counting, {}, "changes self.seen"),
    "a counter in the model": (CountingModel, {}, "changes self.model.1.calls"),
    "a tensor in the model": (MovedModel, {}, "changes self.model.1.mean"),
    "an average": (Averaging, {}, "changes self.ema"),
    "an average in .data": (AveragingData, {}, "changes self.ema"),
    "slots": (Slotted, {}, "changes self.seen"),
    "the data set": (Harder, {}, "changes self.data"),
    "a registered average": (Following, {}, "changes self.models[1].0.weight"),
    "a counter in the loss": (Annealed, {}, "changes self.criterion"),
    "a counter in the config": (Configured, {}, "changes self.config"),
    "the number of workers": (Scaled, {}, "reads self.world_size"),
    "an iterator": (Unlabelled, {}, "changes self.more"),
    "a loop": (Looping, {}, "a loop of its own"),
    "an iterator for the default loop": (Skipping, {}, "gives the default one another iterator"),
    "resized": (Resizing, {}, "resized() of the operator"),
    "an iterable": (Streaming, {}, "not divided by index"),
    "a loader's own loop": (Numbering, {}, "an __iter__ of its own"),
    "gradients of ranks": (Curve, {"options": TrainingOptions(gradients="ranks")}, "gradients='ranks'"),
    "lr": (Curve, {"elastic": {"lr": "linear"}}, "lr='linear'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decided_surely_is_per_worker_and_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, given, reason = REFUSED[name]
    mine = Outcome(kind, KILL, **given)
    per_worker = Outcome(kind, KILL, **{**given, "elastic": {"batch": "per_worker", **given.get("elastic", {})}})
    mine.assert_equals(per_worker)
    assert mine.mode == "per_worker"
    (line,) = said(caplog)
    assert reason in line and "2 workers of 3 train" in line


class Pictures(Curve):
    drawn: list[tuple[int, int, bool]] = []  # noqa: RUF012

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] % 2 == 0 and self.world_rank == 0:
            self.drawn.append((batch_info["global_step"], batch_info["piece"], batch_info["last_piece"]))
        return super().train_batch(batch, batch_info)


def test_info_tells_that_a_batch_is_a_piece() -> None:
    Pictures.drawn = drawn = []
    mine = Outcome(Pictures, Fault("kill", "forward", rank=1, step=3), num_workers=2, config={"rows": 24, "batch": 4})
    assert mine.mode == "global"
    assert drawn[0] == (0, 0, True)  # with all workers
    assert [each for each in drawn if each[0] == 4] == [(4, 0, False), (4, 1, True)]


class Interfering(Curve):
    """Does something in a later batch that a piece must not do."""

    early, late = staticmethod(lambda operator: None), staticmethod(lambda operator: None)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        acts = batch_info["global_step"] >= 3
        self.zero_grad()
        if acts:
            self.early(self)
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        if acts:
            self.late(self)
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


def clip(operator: Any) -> None:
    nn.utils.clip_grad_value_(operator.model.parameters(), 0.01)


def clear(operator: Any) -> None:
    operator.optimizer.zero_grad()


def clamp_data(operator: Any) -> None:
    for each in operator.model.parameters():
        each.grad.data.clamp_(-0.01, 0.01)


def replace(operator: Any) -> None:
    for each in operator.model.parameters():
        each.grad = each.grad / 2


def decay(operator: Any) -> None:
    for each in operator.model.parameters():
        each.data.mul_(0.9)


def step(operator: Any) -> None:
    operator.optimizer.step()


def schedule(operator: Any) -> None:
    operator.schedule.step()


def scale(operator: Any) -> None:
    for group in operator.optimizer.param_groups:
        group["lr"] *= 0.5


def count(operator: Any) -> None:
    operator.counter = getattr(operator, "counter", 0) + 1


@pytest.mark.parametrize(
    ("when", "act", "accumulate"),
    [
        ("early", clear, 1),
        *[
            ("late", *each)
            for each in (
                (clip, 1),
                (clip, 2),
                (clamp_data, 1),
                (replace, 1),
                (decay, 1),
                (clear, 1),
                (step, 1),
                (schedule, 1),
                (schedule, 2),
                (count, 1),
            )
        ],
    ],
)
@pytest.mark.parametrize("faults", [ONE, TWO])
def test_code_that_interferes_after_all_gets_its_batch_again(
    when: str, act: Callable[[Any], None], accumulate: int, faults: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("Interferes", (Interfering,), {when: staticmethod(act)})
    given: dict[str, Any] = {"scheduler_step_freq": "manual", "options": TrainingOptions(accumulate=accumulate)}
    mine = Outcome(kind, *faults, **given)
    assert mine.mode == "per_worker" and mine.reasons[1] == "batch" and len(said(caplog)) == 1
    assert sum(each["num_samples"] for each in mine.results) == 2 * CONFIG["rows"]


class LaterOwn(Curve):
    """From the second epoch on, it has a loop of its own, or another iterator."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        if epoch_idx == 0:
            return super().train_epoch(iterator, info, num_steps, epoch_idx)
        return self.later(iterator, info, num_steps, epoch_idx)

    def later(self, iterator: Any, *given: Any) -> dict[str, Any]:
        for batch in iterator:
            self.train_batch(batch, {})
        return {"train_loss": 0.0}


class LaterCut(LaterOwn):
    def later(self, iterator: Any, *given: Any) -> dict[str, Any]:
        return TrainingOperator.train_epoch(self, itertools.islice(iterator, 4), *given)


@pytest.mark.parametrize("kind", [LaterOwn, LaterCut])
def test_a_loop_that_is_the_users_after_all_gets_its_batch_again(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = Outcome(kind, Fault("kill", "forward", rank=1, step=7), scheduler_step_freq="manual")
    assert mine.mode == "per_worker" and mine.reasons[1] == "batch" and len(said(caplog)) == 1


class Cooling(Curve):
    """Changes its learning rate before its loop."""

    by_epoch = False

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.2 * 0.5**epoch_idx if self.by_epoch else 0.5 * group["lr"]
        return super().train_epoch(iterator, info, num_steps, epoch_idx)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("by_epoch", [False, True])
def test_a_rate_that_a_repeated_train_epoch_changes_again_is_said(by_epoch: bool, step: int, caplog: Any) -> None:
    kind, given = type("Cools", (Cooling,), {"by_epoch": by_epoch}), {"scheduler_step_freq": "manual"}
    mine, other = Outcome(kind, Fault("kill", "forward", rank=1, step=step), **given), Outcome(kind, **given)
    assert (mine.rates == other.rates) is by_epoch
    assert sum("was called again for the rest of its epoch" in each for each in caplog.messages) == (not by_epoch)


@pytest.mark.parametrize("batch", ["auto", "per_worker"])
@pytest.mark.parametrize("at", ["forward", "reduced", "applied"])
def test_a_rate_that_each_batch_multiplies_is_multiplied_once_in_a_step(at: str, batch: str, caplog: Any) -> None:
    """On all ranks, although some have begun the batch that is trained again."""
    kind = type("Late", (Interfering,), {"early": staticmethod(scale)})
    mine = Outcome(kind, Fault("kill", at, rank=1, step=4), scheduler_step_freq="manual", elastic={"batch": batch})
    assert mine.mode == "per_worker" and len(said(caplog)) == (batch == "auto")
    assert mine.rates == [0.2 * 0.5 ** (sum(each["batch_count"] for each in mine.results) - 3)]


class Clipping(Curve):
    """Clips by hand, once in a batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        if batch_info["last_piece"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


@pytest.mark.parametrize("faults", [ONE, TWO])
def test_code_may_clip_by_hand_with_the_last_piece(faults: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = Outcome(Clipping, *faults)
    mine.assert_equals(Outcome(Clipping))
    assert mine.mode == "global" and not said(caplog)


# -- who knows the decision ------------------------------------------------------------------------------


def steps_of_an_epoch(first: int, **given: Any) -> int:
    """Return how many steps an epoch of 36 rows has if the first so many steps have three workers, and the others two."""
    counts: list[int] = []
    schedule = [(first, 3), (None, 2)] if first else [(None, 2)]
    look: Any = lambda trainer, results: counts.append(results[0]["batch_count"])  # noqa: E731
    train(Curve, {"rows": 36, "batch": 3}, schedule, num_workers=3, batch="auto", look=look, **given)
    return sum(counts)


def test_a_step_before_the_decision_is_per_worker(caplog: pytest.LogCaptureFixture) -> None:
    assert steps_of_an_epoch(1) == 4
    assert not any("first step" in each for each in caplog.messages)
    assert steps_of_an_epoch(0) == 1 + 4  # 6 rows, then 9, 9, 9 and 3
    assert sum("2 of 3 workers made the first step" in each for each in caplog.messages) == 1


def rank_of(present: int, kind: type[Curve] = Curve) -> Any:
    settings: dict[str, Any] = {
        "num_workers": 3,
        "scheduler_step_freq": "batch",
        "distributed": True,
        "wrap_ddp": False,
    }
    return torch_rank(kind, {"rows": 36, "batch": 3}, ranks=present, **settings)


def test_states_carry_the_decision() -> None:
    """A peer, a snapshot and a checkpoint: the first step of who gets them divides the batch in the same way already."""
    whole = rank_of(3)
    whole.train(1, num_steps=1)
    peer, resumed = rank_of(1), rank_of(1)
    peer.load(whole.state())
    peer.train(2, num_steps=2)
    resumed.resume(whole.checkpoint()).train(2)
    assert (peer.measured.committed, resumed.measured.committed) == (18, 27)
    # Other code is looked at again, and what was refused before may be kept now.
    direct = rank_of(3, Direct)
    direct.train(1, num_steps=1)
    direct.train(2, num_steps=1)
    assert direct.measured.batch_mode == "per_worker"
    repaired = rank_of(3).resume(direct.checkpoint())
    repaired.train(3, num_steps=1)
    assert repaired.measured.batch_mode == "global"


def test_a_trainer_says_what_was_decided() -> None:
    given: dict[str, Any] = {"config": CONFIG, "num_workers": 2, "use_gpu": False, "scheduler_step_freq": "batch"}
    for batch in ("auto", "global", "per_worker"):
        elastic = ElasticConfig(batch=batch)  # type: ignore[arg-type]
        with Cluster(), TorchTrainer(training_operator_cls=Curve, elastic=elastic, **given) as trainer:
            assert trainer.batch_mode == (None if batch == "auto" else batch)
            trainer.train()
            assert trainer.batch_mode == ("global" if batch == "auto" else batch)


def test_the_batches_of_an_own_loop_are_counted_although_a_worker_fails() -> None:
    """18 rows in 2 steps of three workers, and 22 in 4 of two, which have 7 steps for the next 40."""
    assert [each["batch_count"] for each in Outcome(Looping, KILL).results] == [6, 7]

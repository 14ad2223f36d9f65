"""`ElasticConfig(batch="auto")`: after a worker is lost, a run ends with what an undisturbed one has, or the log says why not."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import ConfigError, ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from raysgd.torch.state.buffers import RestoreBuffers
from tests.local.group import Cluster, Fault
from tests.local.runs import train, weights_of
from tests.peek import send_ahead
from tests.replicas import torch_rank
from tests.torch.test_exact_gradients import Curve, Direct, Sampled, close

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")

WORKERS = 3
CONFIG = {"rows": 40, "batch": 3}  # five steps of three workers


class StepsItsSchedule(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        self.schedule.step()
        return result


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
            assert trainer.batch_mode in (None, "parts", "per_worker")
            self.results = [trainer.train(max_retries=-1), trainer.train()]
            assert len(cluster.left) == 0 and trainer.world_size == given["num_workers"] - len(faults)
            self.mode, self.weights = trainer.batch_mode, weights_of(trainer)
            self.reasons = [each.reason for each in trainer.recoveries]
            self.operator: Any = trainer.get_local_operator()
            buffers = trainer.apply_all_operators(lambda operator: list(operator._registered.models[0].buffers()))
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
    return [each for each in caplog.messages if "cannot be divided into parts" in each]


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
    assert mine.mode == "parts" and not said(caplog)
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
    original = RestoreBuffers._send_together

    def send(self: RestoreBuffers, held: Any) -> None:
        Cluster.running.point("sends")
        original(self, held)

    monkeypatch.setattr(RestoreBuffers, "_send_together", send)
    given: dict[str, Any] = {"num_workers": workers, "options": TrainingOptions(accumulate=accumulate)}
    mine = Outcome(Normed, Fault("kill", at, rank=rank, step=3), config={"rows": 36, "batch": 3}, **given)
    other = Outcome(Normed, config={"rows": 36, "batch": 3}, **given)
    mine.assert_equals(other)
    assert mine.mode == "parts"
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
    assert mine.mode == "parts" and [each.numel() for each in mine.buffers] == [13, 1]


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
    assert mine.mode == "parts" and not said(caplog)


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
def test_registered_metrics_leave_out_repeated_parts(faults: Any) -> None:
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
            Cluster.running.notes.append((batch_info["global_step"], batch_info["part"], self.center.mean.tolist()))
        return super().train_batch(batch, batch_info)


def test_each_part_begins_with_the_buffers_of_the_batch() -> None:
    """A model may compute with its buffers, as spectral normalization does."""
    given: dict[str, Any] = {"config": CONFIG, "num_workers": WORKERS, "use_gpu": False, "scheduler_step_freq": "batch"}
    elastic = ElasticConfig(grow=False)
    with Cluster(ONE) as cluster, TorchTrainer(training_operator_cls=Centered, elastic=elastic, **given) as trainer:
        trainer.train(max_retries=-1)
        assert trainer.batch_mode == "parts"
        found = {(step, piece): mean for step, piece, mean in cluster.notes}
    assert (4, 1) in found and found[4, 0] == found[4, 1] != found[3, 0]


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


class Gan(Curve):
    """Makes another round with the new weights."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        super().train_batch(batch, batch_info)
        return super().train_batch(batch, batch_info)


REFUSED: dict[str, tuple[type[Curve], dict[str, Any], str]] = {
    "a direct step": (Direct, {}, "calls optimizer.step() itself"),
    "a direct zero_grad": (Clearing, {}, "without self.zero_grad() before it"),
    "two rounds": (Gan, {}, "a backward pass after a step, as in a GAN"),
    "a scheduler": (StepsItsSchedule, {"scheduler_step_freq": "manual"}, "steps a scheduler"),
    "a loop": (Looping, {}, "a loop of its own"),
    "an iterator for the default loop": (Skipping, {}, "gives the default one another iterator"),
    "resized": (Resizing, {}, "resized() of the operator"),
    "an iterable": (Streaming, {}, "not divided by index"),
    "a loader's own loop": (Numbering, {}, "an __iter__ of its own"),
    "gradients of ranks": (Curve, {"options": TrainingOptions(gradients="ranks")}, "gradients='ranks'"),
}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_follow_the_contract_is_per_worker_and_said_once(
    name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the worker fails before the first step is made, and the others compute several parts in it."""
    kind, given, reason = REFUSED[name]
    kill = Fault("kill", "forward", rank=1, step=step)
    mine = Outcome(kind, kill, **given)
    (line,) = said(caplog)
    assert mine.mode == "per_worker" and reason in line and "some of the 3 workers are missing" in line
    per_worker = Outcome(kind, kill, **{**given, "elastic": {"batch": "per_worker"}})
    assert len(said(caplog)) == 1
    close(mine.weights, per_worker.weights)
    assert mine.rates == per_worker.rates


def test_the_log_says_so_although_no_worker_fails(caplog: pytest.LogCaptureFixture) -> None:
    assert Outcome(Direct).mode == "per_worker" and len(said(caplog)) == 1
    assert Outcome(Direct, num_workers=1).mode == "parts" and len(said(caplog)) == 1


class Pictures(Curve):
    drawn: list[tuple[int, int, bool]] = []  # noqa: RUF012

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] % 2 == 0 and self.world_rank == 0:
            self.drawn.append((batch_info["global_step"], batch_info["part"], batch_info["last_part"]))
        return super().train_batch(batch, batch_info)


def test_info_tells_that_a_batch_is_a_piece() -> None:
    Pictures.drawn = drawn = []
    mine = Outcome(Pictures, Fault("kill", "forward", rank=1, step=3), num_workers=2, config={"rows": 24, "batch": 4})
    assert mine.mode == "parts"
    assert drawn[0] == (0, 0, True)  # with all workers
    assert [each for each in drawn if each[0] == 4] == [(4, 0, False), (4, 1, True)]


class Noting(Curve):
    noted: list[tuple[int, int, int, list[int]]] = []  # noqa: RUF012

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        place = [batch_info[name] for name in ("epoch_idx", "epoch_batch", "part", "rows")]
        self.noted.append(tuple(place))
        return super().train_batch(batch, batch_info)


def test_info_has_the_place_of_a_part_on_any_worker(tmp_path: Any) -> None:
    Noting.noted = noted = []
    config, given = {"rows": 24, "batch": 4}, {"use_gpu": False, "scheduler_step_freq": "batch"}
    expected = [
        (0, batch, part, [*range(8 * batch + 4 * part, 8 * batch + 4 * part + 4)])
        for batch in range(3)
        for part in range(2)
    ]
    Outcome(Noting, Fault("kill", "forward", rank=1, step=2), num_workers=2, config=config)
    assert [*dict.fromkeys(map(repr, sorted(noted)))][:6] == [repr(each) for each in expected]

    noted.clear()
    with Cluster(()), TorchTrainer(training_operator_cls=Noting, config=config, num_workers=2, **given) as trainer:
        trainer.train(num_steps=2)
        saved = trainer.state_dict()
        noted.clear()
        trainer.train(num_steps=2)
        assert sorted({batch for _, batch, *_ in noted}) == [0, 2], "it counts batches of the data's epoch"
    with Cluster(()), TorchTrainer(training_operator_cls=Noting, config=config, num_workers=2, **given) as trainer:
        trainer.load_state_dict(saved)
        noted.clear()
        trainer.train()
        assert [(batch, part) for _, batch, part, _ in sorted(noted)] == [(2, 0), (2, 1)]


class Interfering(Curve):
    """Violates the contract from the fourth step on."""

    act = staticmethod(lambda operator: None)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if batch_info["global_step"] >= 3:
            self.act(self)
        return result


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


def interfering(act: Callable[[Any], Any]) -> type[Curve]:
    return type("Interferes", (Interfering,), {"act": staticmethod(act)})


LATER: dict[
    str, tuple[type[Curve], str, int, int]
] = {  # with the steps that are made before, and the batches of a window
    "a step": (interfering(lambda operator: operator.optimizer.step()), r"calls optimizer\.step\(\) itself", 3, 1),
    "a round": (interfering(lambda operator: operator.zero_grad()), "a backward pass after a step", 3, 1),
    "a schedule": (interfering(lambda operator: operator.schedule.step()), "steps a scheduler", 3, 1),
    "a schedule in a window": (interfering(lambda operator: operator.schedule.step()), "steps a scheduler", 2, 2),
    "a loop": (LaterOwn, "a loop of its own", 5, 1),
    "an iterator": (LaterCut, "another iterator", 5, 1),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_violation_undoes_the_step_and_is_an_error(name: str) -> None:
    kind, reason, steps, window = LATER[name]
    given: dict[str, Any] = {"scheduler_step_freq": "manual", "options": TrainingOptions(accumulate=window)}
    trainer_given = {"config": CONFIG, "num_workers": WORKERS, "use_gpu": False, **given}
    found: list[Any] = []
    for violates in (True, False):
        elastic = ElasticConfig(grow=False)
        operator = kind if violates else Curve
        with (
            Cluster([Fault("kill", "forward", rank=1, step=2)]),
            TorchTrainer(training_operator_cls=operator, elastic=elastic, **trainer_given) as trainer,
        ):
            if violates:
                with pytest.raises(ConfigError, match=f"(?s){reason}.*first step.*undone.*batch='per_worker'"):
                    trainer.train()
                    trainer.train()
            else:
                trainer.train(num_steps=steps)
            found.append((weights_of(trainer), trainer.apply_all_operators(lambda op: op.schedule.last_epoch)[0]))
            assert trainer.apply_all_operators(lambda op: op._internals.keep_batch.position.step)[0] == steps
    close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1], "the schedule is where it was"


def test_nothing_is_checked_in_later_steps_with_all_workers() -> None:
    for name in ("a step", "a schedule", "a loop"):
        assert Outcome(LATER[name][0], scheduler_step_freq="manual").mode == "parts"


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


class Clipping(Curve):
    """Clips by hand, once in a batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        if batch_info["last_part"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


@pytest.mark.parametrize("faults", [ONE, TWO])
def test_code_may_clip_by_hand_with_the_last_part(faults: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = Outcome(Clipping, *faults)
    mine.assert_equals(Outcome(Clipping))
    assert mine.mode == "parts" and not said(caplog)


# -- other parts ---------------------------------------------------------------------------------------------


class TwoPasses(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.zero_grad()
        self.backward(0.5 * self.criterion(self.model(x), y))
        self.backward(0.5 * self.criterion(self.model(-x), y))
        self.step()
        return {}


class Items(Curve):
    """Each item of the data set is a batch."""

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        return DataLoader([data[start : start + 3] for start in range(0, len(data), 3)], batch_size=None)


@pytest.mark.parametrize("kind", [TwoPasses, Sampled, Items])
@pytest.mark.parametrize("faults", [ONE, TWO])
def test_batches_of_other_kinds_have_parts(kind: type[Curve], faults: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = Outcome(kind, *faults)
    close(mine.weights, Outcome(kind).weights)
    assert mine.mode == "parts" and not said(caplog)


class Alternating(Halves):
    """Steps only one of two optimizers in some batches."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step(self.optimizers[0])
        if batch_info["global_step"] % 2:
            self.step(self.optimizers[1])
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


@pytest.mark.parametrize("faults", [ONE, TWO])
def test_one_of_two_optimizers_may_step_in_some_batches(faults: Any) -> None:
    mine = Outcome(Alternating, *faults)
    mine.assert_equals(Outcome(Alternating))
    assert mine.mode == "parts"


def test_parts_that_are_sent_to_the_device_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    send_ahead(monkeypatch)
    whole = train(Curve, {"rows": 23, "batch": 6}, [(None, 1)])
    for stages in ([(None, 1)], [(2, 1), (None, 2)]):
        close(train(Curve, {"rows": 23, "batch": 3}, stages, num_workers=2, batch="auto"), whole)


class Validated(Curve):
    """Notes the rows that it validates."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        data = [(row, row) for row in range(23)]
        loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        self.register_data(train_loader=self._registered.train_loader, validation_loader=loader)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.notes.append((batch_info["batch_idx"], batch[0].tolist()))
        return {"val_loss": float(batch[0].double().mean()), "num_samples": len(batch[0])}


@pytest.mark.parametrize("num_steps", [2, None])
def test_missing_workers_change_no_validation(num_steps: int | None) -> None:
    found: list[Any] = []
    for faults in ((), ONE, TWO):
        elastic, given = ElasticConfig(grow=False), {"config": CONFIG, "num_workers": WORKERS, "use_gpu": False}
        given["scheduler_step_freq"] = "batch"
        with (
            Cluster(faults) as cluster,
            TorchTrainer(training_operator_cls=Validated, elastic=elastic, **given) as trainer,
        ):
            trainer.train(max_retries=-1)
            result = trainer.validate(num_steps)
            assert trainer.world_size == WORKERS - len(faults)
            found.append((sorted(cluster.notes), result["val_loss"], result["num_samples"], result["batch_count"]))
    assert found[0] == found[1] == found[2]
    assert found[0][2:] == ((12, 2) if num_steps else (23, 4))


# -- who knows the decision ------------------------------------------------------------------------------


def rank_of(present: int, kind: type[Curve] = Curve) -> Any:
    settings: dict[str, Any] = {
        "num_workers": 3,
        "scheduler_step_freq": "batch",
        "alone": False,
        "wrap_ddp": False,
    }
    return torch_rank(kind, {"rows": 36, "batch": 3}, ranks=present, **settings)


def test_states_carry_the_decision() -> None:
    """A peer gets it, and a checkpoint is checked again, because other code may follow the contract."""
    whole = rank_of(3)
    whole.train(1, num_steps=1)
    peer, resumed = rank_of(1), rank_of(1)
    peer.load(whole.state())
    peer.train(2, num_steps=2)
    resumed.resume(whole.checkpoint()).train(2)
    assert (peer.measured.committed, resumed.measured.committed) == (18, 27)
    direct = rank_of(3, Direct)
    direct.train(1, num_steps=1)
    assert direct.measured.batch_mode == "per_worker"
    other = rank_of(1, Direct)
    other.load(direct.state())
    other.train(2, num_steps=1)
    assert other.measured.committed == 3, "nothing is trained again"
    repaired = rank_of(3).resume(direct.checkpoint())
    repaired.train(3, num_steps=1)
    assert repaired.measured.batch_mode == "parts"


def test_a_trainer_says_what_was_decided() -> None:
    given: dict[str, Any] = {"config": CONFIG, "num_workers": 2, "use_gpu": False, "scheduler_step_freq": "batch"}
    for batch, mode in (("auto", "parts"), ("per_worker", "per_worker")):
        elastic = ElasticConfig(batch=batch)  # type: ignore[arg-type]
        with Cluster(), TorchTrainer(training_operator_cls=Curve, elastic=elastic, **given) as trainer:
            assert trainer.batch_mode is None
            trainer.train()
            assert trainer.batch_mode == mode


@pytest.mark.parametrize(("saved", "lines"), [(2, 0), (3, 1)])
def test_a_checkpoint_with_other_parts_is_said(saved: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"config": CONFIG, "use_gpu": False, "scheduler_step_freq": "batch"}
    with Cluster(), TorchTrainer(training_operator_cls=Curve, num_workers=saved, **given) as trainer:
        trainer.train(num_steps=1)
        state = trainer.state_dict()
    for batch, times in (("per_worker", 0), ("auto", lines)):
        elastic = ElasticConfig(batch=batch)  # type: ignore[arg-type]
        with Cluster(), TorchTrainer(training_operator_cls=Curve, num_workers=2, elastic=elastic, **given) as trainer:
            trainer.load_state_dict(state)
            trainer.train(num_steps=1)
        said = [each for each in caplog.messages if "the batches of the checkpoint's run have" in each]
        assert len(said) == times and all("have 3 parts" in each and "have 2 with" in each for each in said)


def test_no_worker_is_without_a_part() -> None:
    given: dict[str, Any] = {"config": CONFIG, "num_workers": 2, "use_gpu": False, "scheduler_step_freq": "batch"}
    with Cluster(), TorchTrainer(training_operator_cls=Curve, **given) as trainer:
        with pytest.raises(ConfigError, match=r"(?s)num_workers=2 workers at most.*num_workers=3.*batch='per_worker'"):
            trainer.resize(3)
        assert trainer.world_size == 2
    elastic = ElasticConfig(batch="per_worker")
    with Cluster(), TorchTrainer(training_operator_cls=Curve, elastic=elastic, **given) as trainer:
        trainer.resize(3)
        assert trainer.world_size == 3


def test_the_batches_of_an_own_loop_are_counted_although_a_worker_fails() -> None:
    """18 rows in 2 steps of three workers, and 22 in 4 of two, which have 7 steps for the next 40."""
    assert [each["batch_count"] for each in Outcome(Looping, KILL).results] == [6, 7]

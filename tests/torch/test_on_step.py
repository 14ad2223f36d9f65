"""`on_step` is called once for each step that counts, on every rank, whichever fails and however the batch is divided."""

import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, ElasticConfig, TorchTrainer, TrainingOptions
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.torch.small import inline
from tests.torch.test_exact_gradients import Curve, close

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
CONFIG = {"rows": 40, "batch": 3}
STEPS = 5  # of an epoch with three workers


class Averaged(Curve):
    """Averages its weights by hand, and notes what it gets."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ema = nn.utils.parameters_to_vector(self.unwrapped().parameters()).detach()
        self.infos: list[Any] = []

    def on_step(self, info: dict[str, Any]) -> None:
        now = nn.utils.parameters_to_vector(self.unwrapped().parameters()).detach()
        self.ema = torch.lerp(self.ema, now, 0.1)
        self.infos.append((info["global_step"], info["epoch_idx"], info["skipped"], info["note"]))

    def state_dict(self) -> Any:
        return {"ema": self.ema, "infos": self.infos}

    def load_state_dict(self, state: Any) -> None:
        self.ema, self.infos = state["ema"], list(state["infos"])


class Looping(Averaged):
    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[str, Any]:
        for batch in iterator:
            self.train_batch(batch, {})
        return {}


def run(kind: Any, *faults: Fault, **given: Any) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Return the weights, their average, and what `on_step` got, which are equal on all ranks."""
    elastic = ElasticConfig(grow=False, snapshot_every=1, **given.pop("elastic", {}))
    arguments = {"config": CONFIG, "num_workers": 3, "use_gpu": False, "scheduler_step_freq": "batch", **given}
    with Cluster(faults) as cluster, TorchTrainer(training_operator_cls=kind, elastic=elastic, **arguments) as trainer:
        for _ in range(2):
            trainer.train(info={"note": "a"}, max_retries=-1)
        assert not cluster.left
        found = trainer.apply_all_operators(lambda operator: (operator.ema, operator.infos))
        for ema, infos in found:
            assert torch.equal(ema, found[0][0]) and infos == found[0][1]
        return weights_of(trainer), *found[0]


ALL = tuple(Fault("kill", "forward", rank=rank, step=3) for rank in range(3))
DISTURBED = [(Fault("kill", at, rank=rank, step=3),) for at in ("forward", "reduced", "applied") for rank in (0, 1)]


@pytest.mark.parametrize("faults", [*DISTURBED, ALL])
def test_it_is_called_once_for_each_step_whichever_rank_fails(faults: tuple[Fault, ...]) -> None:
    weights, ema, infos = run(Averaged)
    assert infos == [(step + 1, step // STEPS, False, "a") for step in range(2 * STEPS)]
    mine = run(Averaged, *faults)
    close(mine[0], weights)
    close(mine[1], ema)
    assert mine[2] == infos


class Registered(Averaged):
    """Averages its weights in torch's own AveragedModel, too, which is registered, and validates with that."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        (self.model, self.average), self.optimizer, self.criterion = self.register(
            models=[model, average.requires_grad_(False)],
            optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            criterion=self.loss(),
        )
        x, y = held_out(config["rows"])
        self.register_data(
            train_loader=DataLoader(TensorDataset(x, y), batch_size=config["batch"], drop_last=True),
            validation_loader=DataLoader(TensorDataset(x, y), batch_size=7),
        )
        self.ema, self.infos = torch.zeros(0), []

    def on_step(self, info: dict[str, Any]) -> None:
        if not info["skipped"]:
            now = nn.utils.parameters_to_vector(self.unwrapped(self.model).parameters()).detach()
            self.ema = torch.lerp(self.ema, now, 0.1) if len(self.ema) else now.clone()
            self.average.update_parameters(self.unwrapped(self.model))

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": self.criterion(self.average(batch[0]), batch[1])}


def held_out(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(7)).double()
    return x, (3 * x).sin().sum(1, keepdim=True)


def averaged(trainer: TorchTrainer) -> torch.Tensor:
    """Return the average, which is the same on all ranks, equals that by hand, and is validated with."""
    loss, (_, average) = trainer.validate()["val_loss"], trainer.get_model()
    with torch.no_grad():
        x, y = held_out(CONFIG["rows"])
        close(torch.tensor(loss, dtype=x.dtype), nn.functional.mse_loss(average(x), y))
    every = trainer.apply_all_operators(
        lambda operator: (nn.utils.parameters_to_vector(operator.average.parameters()), operator.ema)
    )
    assert all(torch.equal(each, every[0][0]) for each, _ in every)
    close(*every[0])
    return every[0][0]


@pytest.mark.parametrize("faults", [*DISTURBED, ALL])
def test_a_registered_average_is_exact(faults: tuple[Fault, ...], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"config": CONFIG, "num_workers": 3, "use_gpu": False}
    arguments |= {"training_operator_cls": Registered, "elastic": ElasticConfig(grow=False, snapshot_every=1)}
    found = []
    for disturbed in ((), faults):
        with Cluster(disturbed) as cluster, TorchTrainer(**arguments) as trainer:
            trainer.train(info={"note": "a"}, max_retries=-1)
            path = trainer.save(tmp_path / f"{len(found)}.pt")
            first = averaged(trainer)
            trainer.train(info={"note": "a"})
            found.append((first, averaged(trainer)))
            trainer.load(path)
            assert torch.equal(averaged(trainer), first)
            trainer.train(info={"note": "a"})
            close(averaged(trainer), found[-1][1])
            assert not cluster.left
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_accumulated_steps_and_own_loops_have_it_once() -> None:
    given: dict[str, Any] = {"options": TrainingOptions(accumulate=2)}
    _, ema, infos = run(Averaged, **given)
    assert [step for step, *_ in infos] == [2, 4, 5, 7, 9, 10]
    mine = run(Averaged, *DISTURBED[0], **given)
    close(mine[1], ema)
    assert mine[2] == infos
    looped = run(Looping, elastic={"batch": "per_worker"})
    assert looped[2] == [(step + 1, step // STEPS, False, "a") for step in range(2 * STEPS)]


class Spoiled(Averaged):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        factor = math.nan if batch_info["global_step"] in (1, 6) else 1.0
        return super().train_batch([batch[0] * factor, batch[1]], batch_info)


def test_a_step_that_was_left_out_has_it_too() -> None:
    infos = run(Spoiled, *DISTURBED[1], options=TrainingOptions(on_nonfinite="skip"))[2]
    assert [step for step, _, skipped, _ in infos if skipped] == [2, 7]
    assert [step for step, *_ in infos] == [*range(1, 2 * STEPS + 1)]


class Drawing(Averaged):
    def on_step(self, info: dict[str, Any]) -> None:
        self.infos.append((info["global_step"], random.random(), float(numpy.random.rand()), float(torch.rand(()))))


def test_its_random_numbers_are_those_of_the_step() -> None:
    infos = run(Drawing, seed=3)[2]
    assert len({number for _, *drawn in infos for number in drawn}) == 3 * len(infos)
    assert run(Drawing, *DISTURBED[0], seed=3)[2] == infos
    assert run(Drawing, seed=4)[2] != infos


class Failing(Averaged):
    fails_at = 2

    def on_step(self, info: dict[str, Any]) -> None:
        if info["global_step"] == type(self).fails_at:
            type(self).fails_at = -1
            raise ZeroDivisionError("in on_step")
        super().on_step({"note": "a", **info})


def test_an_error_in_it_is_raised_and_the_step_stays_made() -> None:
    given: dict[str, Any] = {"config": CONFIG, "scheduler_step_freq": "batch"}
    expected = None
    for fails_at in (-1, 2):
        Failing.fails_at = fails_at
        with inline(Failing, **given) as trainer:
            if fails_at > 0:
                with pytest.raises(ZeroDivisionError, match="in on_step"):
                    trainer.train()
            trainer.train()
            weights = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
            infos = trainer.get_local_operator().infos
        steps = [step for step, *_ in infos]
        assert steps == [step for step in range(1, 15) if step != fails_at]
        expected = weights if expected is None else expected
        close(weights, expected)


def test_wrong_arguments_are_refused() -> None:
    kind = type("Wrong", (Curve,), {"on_step": lambda self: None})
    with pytest.raises(ConfigError, match=r"Wrong\.on_step must take \(self, info\)"):
        inline(kind, config=CONFIG)

"""`on_step` is called once for each step that counts, on every rank, whichever fails and however the batch is divided."""

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

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

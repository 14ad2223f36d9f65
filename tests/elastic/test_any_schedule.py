"""Workers are killed and their number changes at random: the weights are those of an undisturbed run. Real processes."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer
from tests.faults import Fault, fired
from tests.torch.schedules import EPOCHS, Disturbed, Setting, trained

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Killed(Disturbed):
    def begin(self, step: int, samples: list[int]) -> None:
        self.fault("before")

    def end(self) -> None:
        self.fault("after")

    def fault(self, where: str) -> None:
        for fault in self.config["faults"]:
            if (fault.rank, fault.where) == (self.world_rank, where) and fault.step <= self.global_step:
                fault.fire(self.config["marks"])


def drawn(seed: int) -> tuple[Setting, list[tuple[int, int]], list[Fault]]:
    """Return a run on two or three workers, at which steps their number changes, and who is killed when."""
    draw = random.Random(seed)
    rows, workers = draw.randint(13, 40), draw.randint(2, 3)
    given: dict[str, Any] = {"mode": "auto", "accumulate": 1, "rows": rows, "workers": workers, "faults": ()}
    setting = Setting.draw(seed, model=("mlp", "conv", "gpt")[seed % 3], batch=draw.randint(1, 2), **given)
    if seed % 7 == 6:
        setting = replace(setting, compile={"backend": "aot_eager"})
    steps = EPOCHS * setting.steps
    kills = [
        Fault(draw.randrange(2), step, where=draw.choice(["before", "after"]))
        for step in draw.sample(range(1, steps - 1), min(2, steps - 2))
    ]
    resizes = [(draw.randrange(1, steps), draw.randint(1, workers)) for _ in range(draw.randint(0, 2))]
    return setting, sorted(resizes), kills


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(10) if n not in (0, 2))]
)
def test_any_schedule_of_real_processes(seed: int, tmp_path: Path) -> None:
    setting, resizes, kills = drawn(seed)
    print(setting, resizes, kills)
    with TorchTrainer(
        training_operator_cls=Killed,
        config=setting.config(faults=kills, marks=str(tmp_path)),
        num_workers=setting.workers,
        use_gpu=False,
        seed=setting.seed,
        scheduler_step_freq="batch" if setting.rates else None,
        options=setting.options(),
        elastic=ElasticConfig(hang_timeout_s=60),
    ) as trainer:
        done = 0
        for step, workers in [*resizes, (EPOCHS * setting.steps, 0)]:
            if step > done:
                trainer.train(num_steps=step - done, max_retries=-1)
            if workers:
                trainer.resize(workers)
            done = step
        weights = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
        reasons = [each.reason for each in trainer.recoveries]
    assert set(fired(tmp_path)) >= {fault.name for fault in kills if fault.rank == 0}
    assert not kills or "worker death" in reasons
    torch.testing.assert_close(
        weights, trained(replace(setting, compile=False), undisturbed=True)[0], rtol=1e-12, atol=1e-12
    )

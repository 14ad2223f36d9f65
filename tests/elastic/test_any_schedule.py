"""Workers are killed and their number changes at random: the weights are those of an undisturbed run. Real processes."""

import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer
from tests.background import Background
from tests.faults import Fault, fired
from tests.torch.schedules import EPOCHS, Disturbed, Setting, Shown, trained

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
    given: dict[str, Any] = {"mode": "auto", "accumulate": 1, "rows": rows, "parts": workers, "faults": (), "moves": ()}
    setting = Setting.draw(seed, model=("dropout", "batchnorm", "gpt")[seed % 3], batch=draw.randint(1, 2), **given)
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
        num_workers=setting.parts,
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
    # Adam multiplies the rounding errors of gradients that are 0, as those of a bias before BatchNorm.
    torch.testing.assert_close(
        weights, trained(replace(setting, compile=False), undisturbed=True).weights, rtol=1e-9, atol=1e-9
    )


SCRIPT = """
import json, os, signal, sys, time
import torch
from raysgd import TorchTrainer
from raysgd.callbacks import Callback
from tests.torch.schedules import EPOCHS, STATE, Disturbed, Setting

name, model, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
setting = Setting(7, model=model, augments="batch", rows=26, rates="cosine")

class Slow(Disturbed):
    def begin(self, step, samples):
        time.sleep(0.1)

class Killer(Callback):
    def on_progress(self, now):
        if kills and now.progress.step >= kills and now.kind == "train":
            os.kill(os.getpid(), signal.SIGKILL)

with TorchTrainer(
    training_operator_cls=Slow, config=setting.config(), num_workers=setting.parts, num_cpus_per_worker=0.05, use_gpu=False,
    seed=setting.seed, scheduler_step_freq="batch", options=setting.options(), name=name, callbacks=[Killer()],
) as trainer:
    if kills:
        trainer.resize(2)
    for _ in trainer.epochs(EPOCHS):
        trainer.train()
        trainer.validate()
    state = trainer.state_dict()
    torch.save({name: state[name] for name in STATE if name in state}, "state.pt")
"""


def killed_twice(background: Background, model: str) -> dict[str, Any]:
    """Kill a script in each epoch, and let the third one end."""
    folder = background.folder()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    for kills, code in ((2, -signal.SIGKILL), (8, -signal.SIGKILL), (0, 0)):
        done = background.run("script.py", model, model, str(kills), connected=True, folder=folder)
        assert done.returncode == code, done.stderr
    found: dict[str, Any] = torch.load(folder / "state.pt", weights_only=False)
    return found


@pytest.mark.more
@pytest.mark.parametrize("model", ["dropout", pytest.param("batchnorm", marks=pytest.mark.nightly)])
@pytest.mark.script(run=killed_twice)
def test_scripts_with_a_name_that_are_killed(outcome: Any, model: str) -> None:
    setting = Setting(7, model=model, augments="batch", rows=26, rates="cosine")
    expected = trained(setting, undisturbed=True).state
    expected["models"], expected["optimizers"] = expected["models"][:1], expected["optimizers"][:1]
    assert not Shown(state=outcome()).differences(Shown(state=expected), 1e-9)

"""A GPU breaks in a worker. There is none: `tests/harming.py` raises its errors, and a Ray that only counts GPUs gives them out."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer
from tests.background import Background
from tests.faults import Fault
from tests.torch.schedules import EPOCHS, Disturbed, Setting, trained

pytestmark = pytest.mark.elastic


class Breaks(Disturbed):
    def begin(self, step: int, samples: list[int]) -> None:
        for fault in self.config["faults"]:
            if (fault.rank, fault.step) == (self.world_rank, step):
                fault.fire(self.config["marks"])


@pytest.mark.parametrize("kind", ["ecc", "assert"])
def test_the_others_continue_exactly_when_a_gpu_breaks(
    ray_cluster: None, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting.draw(3, model="mlp", rows=37, batch=2, parts=3, mode="auto", accumulate=1, faults=(), moves=())
    with TorchTrainer(
        training_operator_cls=Breaks,
        config=setting.config(faults=[Fault(1, 3, kind)], marks=str(tmp_path)),
        num_workers=3,
        use_gpu=False,
        seed=setting.seed,
        scheduler_step_freq="batch" if setting.rates else None,
        options=setting.options(),
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
        weights = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
        (failure,) = trainer.recoveries
    assert (failure.reason, failure.removed_ranks, failure.in_place) == ("gpu failure", (1,), True)
    assert (failure.world_size_before, failure.world_size_after, failure.batches_redone) == (3, 2, 0)
    text = {"ecc": "uncorrectable ECC error encountered", "assert": "device-side assert triggered"}[kind]
    says = rf"a GPU \(GPU-5f1c\) on node \S+: AcceleratorError: CUDA error: {text}"
    assert re.fullmatch(says, failure.detail), failure.detail
    assert failure.detail in caplog.text
    undisturbed = trained(replace(setting, compile=False), undisturbed=True).weights
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, undisturbed, rtol=1e-12, atol=1e-12)


# -- a GPU that Ray gives out again -------------------------------------------------------------------

SCRIPT = """
import json, logging, os, sys, time
from pathlib import Path
import ray
from raysgd import train
from raysgd.torch.setup import wants_gpu
from raysgd.train import Trainer
from tests.harming import harm
from tests.torch.schedules import EPOCHS, Disturbed, Setting, trained

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
marks = Path(marks)
ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

class Watch(logging.Handler):
    def emit(self, record):
        if "keeps the GPU" in record.getMessage():
            (marks / "parked").touch()

logging.getLogger("raysgd").addHandler(Watch())

def used():
    (marks / f"{os.environ['CUDA_VISIBLE_DEVICES']}-{os.getpid()}").touch()

def function():
    found = train.load_checkpoint()
    history = [] if found is None else found["history"]
    until = time.monotonic() + 100
    while history[-3:] != ["parked"] * 3 and time.monotonic() < until:
        if train.world_size() == 2 and os.environ["CUDA_VISIBLE_DEVICES"] == "0":
            harm("ecc")
        history = [*history, "parked" if (marks / "parked").exists() else train.world_size()]
        train.save_checkpoint(history=history)
        time.sleep(0.1)
    return history

trainer = Trainer("none", num_workers=2, use_gpu=True, logdir=marks / "logs")
trainer.start(initialization_hook=used)
history = trainer.run(function)[0]
reasons = [each.reason for each in trainer.recoveries]
details = [each.detail for each in trainer.recoveries if each.reason == "gpu failure"]
free = ray.available_resources().get("GPU", 0)
auto = wants_gpu("auto")
trainer.shutdown()
until = time.monotonic() + 20
while ray.available_resources().get("GPU", 0) < 2 and time.monotonic() < until:
    time.sleep(0.1)
print("FACTS " + json.dumps({
    "used": sorted(each.name.split("-")[0] for each in marks.glob("?-*")), "reasons": reasons, "details": details,
    "history": history, "auto": auto, "free": free, "after": ray.available_resources().get("GPU", 0),
}))
ray.shutdown()
"""


def run(background: Background) -> dict[str, Any]:
    folder = background.folder()
    ran = background.run("-c", f"marks = {str(folder)!r}\n{SCRIPT}")
    facts = [line for line in ran.stdout.splitlines() if line.startswith("FACTS ")]
    assert facts, ran.stdout + ran.stderr
    return {**json.loads(facts[0].removeprefix("FACTS ")), "log": ran.stdout}


@pytest.mark.more
@pytest.mark.script(run=run)
def test_no_worker_uses_a_gpu_after_its_second_failure(outcome: Callable[[], dict[str, Any]]) -> None:
    """GPU 0 breaks whenever two workers train. Ray gives it to each new worker, as the other one is in use."""
    facts = outcome()
    assert facts["reasons"] == ["gpu failure", "growth", "gpu failure"]
    assert all(each.startswith("GPU 0 (GPU-5f1c) on node ") for each in facts["details"])
    assert facts["used"] == ["0", "0", "1"], "the third worker that has got it is not set up"
    assert facts["history"][-3:] == ["parked"] * 3, "the other worker continues"
    assert facts["free"] == 0, "the third worker holds it, so that Ray gives it to no other one"
    assert facts["after"] == 2, "until the trainer is shut down"
    assert (
        facts["log"].count("GPU 0 on node") == facts["log"].count("has failed 2 times: raysgd starts no more") + 1 == 2
    )
    assert facts["auto"] is True and "this machine has no GPU, but the Ray cluster has 2" in facts["log"]
    assert facts["log"].count("This worker keeps the GPU without using it") == 1

"""Lightning's Trainer on workers that are killed: the samples, rates and validations of each step equal those of an undisturbed run, and
the weights within the rounding of another order of sums."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from raysgd import ElasticConfig, train
from raysgd.train import Trainer
from tests.faults import kill_after
from tests.train.lightning.fits import assert_equal, fit
from tests.train.lightning.programs import distance, fit_with_kills

pytestmark = pytest.mark.elastic
WORKERS = 3


def imports_of_a_fit() -> None:
    """Import what a fit needs before a replacement joins, because the others would wait for that."""
    import tests.train.lightning.programs  # noqa: F401


def until_complete() -> int:
    """Wait until all workers have joined. Return this one's process id."""
    state = train.elastic({"looks": 0})
    while train.world_size() < WORKERS:
        state["looks"] += 1
        assert state["looks"] < 2400, "no worker joined within two minutes"
        time.sleep(0.05)
        state.commit()
    return os.getpid()


class Run:
    """Owns a trainer, and the results of undisturbed fits."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._undisturbed = folder, dict[str, Any]()
        elastic = ElasticConfig(hang_timeout_s=120, grow=True)
        self.trainer = Trainer("torch", num_workers=WORKERS, logdir=folder / "logs", max_retries=-1, elastic=elastic)
        self.trainer.start(imports_of_a_fit)
        self.recoveries: list[Any] = []

    def fit(
        self, settings: dict[str, Any], *faults: tuple[int, int, str], kills: Sequence[tuple[int, float, int]] = ()
    ) -> dict[str, Any]:
        """Fit on all workers, with the faults and kills. Return rank 0's record; all ranks have the same."""
        self.complete()
        before = len(self.trainer.recoveries)
        marks = self._folder / str(time.time())
        marks.mkdir()
        killers = [threading.Thread(target=kill_after, args=(*each, marks)) for each in kills]
        for killer in killers:
            killer.start()
        results = self.trainer.run(fit, {**settings, "faults": faults, "marks": str(marks), "counted": bool(kills)})
        for killer in killers:
            killer.join()
        self.recoveries = self.trainer.recoveries[before:]
        for result in results[1:]:
            assert_equal(result, results[0], within=0)
        assert len(list(marks.glob("*-*"))) == len(faults), "each fault has happened"
        return results[0]

    def complete(self) -> list[int]:
        """Wait for the replacements of workers that earlier faults have killed. Return all process ids."""
        return self.trainer.run(until_complete)

    def undisturbed(self, settings: dict[str, Any]) -> dict[str, Any]:
        key = repr(settings)
        if key not in self._undisturbed:
            self._undisturbed[key] = self.fit(settings)
        return self._undisturbed[key]


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("lightning"))
    yield run
    run.trainer.shutdown()


@pytest.mark.more
@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1, "trainer": {"gradient_clip_val": 0.1, "val_check_interval": 0.5}},
        pytest.param({}, marks=pytest.mark.nightly),
    ],
)
def test_an_undisturbed_fit_has_the_bits_of_torchruns(shared: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    script += ["-m", "tests.train.lightning.fits", str(tmp_path), json.dumps(settings)]
    subprocess.run(script, check=True, timeout=280)
    for plain in (torch.load(tmp_path / "rank0.pt"), shared.fit({**settings, "elastic": False})):
        assert plain["world"] == WORKERS
        assert_equal(shared.undisturbed(settings), plain, within=0)


CASES: dict[str, tuple[list[tuple[int, int, str]], dict[str, Any]]] = {
    "before a step": ([(1, 5, "before")], {}),
    "in forward": ([(2, 5, "forward")], {}),
    "after a step": ([(0, 5, "after")], {}),
    "two at once": ([(1, 5, "before"), (2, 5, "before")], {}),
    "two, one after the other": ([(1, 2, "before"), (0, 6, "after")], {}),
    "at an epoch's first batch": ([(1, 4, "forward")], {}),
    "in validation": ([(1, 4, "validation")], {}),
    "in a validation within an epoch": ([(1, 2, "validation")], {"trainer": {"val_check_interval": 0.5}}),
    "after a validation within an epoch": ([(1, 2, "forward")], {"trainer": {"val_check_interval": 0.5}}),
    "in a save of the best model": ([(0, 4, "save")], {"best": True}),
    "in bfloat16, in a report": ([(1, 4, "save")], {"reports": True, "trainer": {"precision": "bf16-mixed"}}),
    "with an incomplete last step": ([(1, 9, "before")], {"size": 187}),
    "with loader processes": ([(1, 5, "forward")], {"loader": {"num_workers": 2}}),
    "with a replacement": ([(1, 5, "forward")], {"waits": True, "trainer": {"max_epochs": 8}}),
}


# Stops in one process show these, too, and the other cases have the same places on workers.
LIKE_OTHERS = ("before a step", "in forward", "after a validation within an epoch")


@pytest.mark.more
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case in LIKE_OTHERS else ()) for case in CASES]
)
def test_a_killed_worker_changes_no_number(shared: Run, case: str) -> None:
    faults, settings = CASES[case]
    undisturbed, found = shared.undisturbed(settings), shared.fit(settings, *faults)
    assert_equal(found, undisturbed, within=1e-3 if "precision" in settings.get("trainer", {}) else 1e-6)
    assert shared.recoveries[0].reason == "worker death" and shared.recoveries[0].in_place
    if case == "with a replacement":
        assert found["world"] == WORKERS and shared.recoveries[-1].reason == "growth"


@pytest.mark.more
def test_the_weights_have_seen_each_sample_once(shared: Run) -> None:
    """In the incomplete last step of 7 samples, each has a seventh of the step's gradient, and not a twelfth."""
    settings = {"size": 187, "witnesses": 187, "trainer": {"accumulate_grad_batches": 1}}
    found = shared.fit(settings, (1, 7, "before"), (0, 12, "after"))
    seen = found["weights"]["witness"]
    last = {sample for step in (found["samples"][15], found["samples"][31]) for sample in step}
    expected = torch.full((187,), -2 * 0.0625 / 12)
    for step in (found["samples"][15], found["samples"][31]):
        assert len(step) == 7
        expected[step] += 0.0625 / 12 - 0.0625 / 7
    assert len(last) > 7 and torch.allclose(seen, expected, atol=1e-7)


@pytest.mark.more
def test_a_preemption_notice_reaches_raysgd(shared: Run) -> None:
    """Lightning's own handler of SIGTERM makes a collective call, for which the job waits until it hangs."""
    settings = {"waits": True, "trainer": {"max_epochs": 8}}
    undisturbed = shared.undisturbed(settings)
    found = shared.fit({**settings, "signal": signal.SIGTERM}, (1, 5, "forward"))
    assert_equal(found, undisturbed)
    assert "preempt" in shared.recoveries[0].reason


PROGRAMS: dict[str, dict[str, Any]] = {
    "ReduceLROnPlateau": {"scheduler": "ReduceLROnPlateau of val_loss"},
    "ReduceLROnPlateau of a mean over the epoch": {"scheduler": "ReduceLROnPlateau of train_loss"},
    "ReduceLROnPlateau of steps": {
        "scheduler": "ReduceLROnPlateau of steps",
        "trainer": ["validation within the epoch"],
    },
    "BackboneFinetuning": {"callbacks": ["BackboneFinetuning"], "hooks": ["metric"]},
    "GradientAccumulationScheduler": {"callbacks": ["GradientAccumulationScheduler"]},
    "files": {"callbacks": ["ModelCheckpoint of steps", "ModelCheckpoint, last"]},
}
USUAL = {"trainer": [], "callbacks": [], "hooks": [], "scheduler": "none", "optimizer": "AdamW", "dropout": 0.0}
USUAL |= {"size": 96, "every": 1, "counting": "last", "log_every": 1}


@pytest.mark.more
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_has_the_numbers_of_an_undisturbed_one(shared: Run, case: str, tmp_path: Path) -> None:
    """With one worker that is killed, and with two, one after the other. Layers that are unfrozen are averaged, so all ranks end with
    the same."""
    program = {**USUAL, **PROGRAMS[case]}
    results = []
    for name, kills in {"none": [], "one": [(1, 100)], "two": [(2, 60), (0, 40)]}.items():
        (tmp_path / name / "fit").mkdir(parents=True)
        shared.complete()
        found = shared.trainer.run(fit_with_kills, {"program": program, "folder": str(tmp_path / name), "kills": kills})
        assert len([*(tmp_path / name).glob("killed-*")]) == len(kills)
        assert all(distance(each["weights"], found[0]["weights"]) == 0.0 for each in found[1:])
        results.append(found[0])
    names = results[0].keys() - {"others", "calls", "seen", "mean"}  # a validation's batches depend on the workers
    distances = {name: max(distance(each[name], results[0][name]) for each in results[1:]) for name in names}
    assert {name: value for name, value in distances.items() if value > 2e-6} == {}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.nightly) for seed in range(20)]
)
def test_two_kills_at_any_time(shared: Run, seed: int) -> None:
    draw, settings = random.Random(seed), {"size": 187, "trainer": {"max_epochs": 6}}
    undisturbed, processes = shared.undisturbed(settings), shared.complete()
    kills = [(draw.randint(1, 45), draw.uniform(0, 0.1), process) for process in draw.sample(processes, 2)]
    assert_equal(shared.fit(settings, kills=kills), undisturbed)
    assert shared.recoveries, "a kill has happened"

"""A run is a function of its code, its data, its seed and its parts: whatever happens to its workers and its script, the weights,
buffers, rates and numbers are those of an undisturbed run."""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, ElasticConfig, RaysgdError, TorchTrainer
from raysgd.callbacks import Callback
from raysgd.core.decisions.dealing import BySpeed
from raysgd.torch import TrainingOperator
from raysgd.torch.step.parts.dealing import OwnSeconds
from raysgd.torch.step.skipped_steps import summed
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.torch.schedules import EPOCHS, MOST, STATE, Move, Noted, Setting, Shown, started, trained, trainer_of

pytestmark = pytest.mark.usefixtures("quiet")

Ended = tuple[torch.Tensor, dict[str, Any]]  # the weights and the state of a run

# An epoch has four steps. The last one has two samples, fewer than there are parts.
PLAIN = Setting(7, rows=26, batch=2, parts=4, rates="cosine", room=5)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"model": "dropout"},
    "augmentation in train_batch": {"augments": "batch"},
    "augmentation in the data set": {"augments": "data"},
    "BatchNorm": {"model": "batchnorm"},
    "ragged token counts": {"model": "ragged"},
    "accumulation": {"accumulate": 2},
    "clipping": {"clip": {"clip_norm": 0.05}},
    "fp16": {"precision": "fp16", "double": False},
    "two optimizers": {"optimizer": "two"},
    "two optimizers in turn": {"optimizer": "in turn"},
}
SLOW: dict[str, dict[str, Any]] = {
    "augmentation in loader processes": {"augments": "processes", "model": "dropout"},
    "torch.compile": {"compile": {"backend": "aot_eager"}},
}
KILLS = tuple(
    Fault("kill", at, rank=rank, step=step)
    for at, rank, step in (("forward", 0, 1), ("reduced", 1, 3), ("applied", 0, 5))
)
COURSES: dict[str, dict[str, Any]] = {
    "1 worker": {"moves": (Move(0, 1),)},
    "2 workers": {"moves": (Move(0, 2),)},
    "3 workers": {"moves": (Move(0, 3),)},
    "kills": {"faults": KILLS, "grow": False},
    "kills and replacements": {"faults": KILLS},
    "smaller and larger": {"moves": (Move(1, 1), Move(3, 3), Move(6, 4))},
    "a load in mid-epoch": {"moves": (Move(2, 3, loads=True),)},
    "a load and a kill on fewer workers": {
        "moves": (Move(0, 2), Move(2, 3, loads=True)),
        "faults": KILLS[:1],
        "grow": False,
    },
}
# Of loader processes, which take seconds, a row for each way in which workers change.
ENOUGH = ("1 worker", "kills and replacements", "smaller and larger", "a load and a kill on fewer workers")


def tier(feature: str, course: str) -> Any:
    few = feature == "torch.compile" or course in ENOUGH
    detects = feature in FEATURES or (course == "kills" and feature != "torch.compile")  # also a mutant
    return () if detects else pytest.mark.more if few else pytest.mark.nightly


TABLE = [
    pytest.param(feature, course, id=f"{feature}-{course}", marks=tier(feature, course))
    for feature in {**FEATURES, **SLOW}
    for course in COURSES
]


@cache
def undisturbed(feature: str, parts: int, begins: tuple[int, ...]) -> Shown:
    """Train with calls that begin at these steps."""
    moves = tuple(Move(step, parts) for step in begins)
    return trained(replace(PLAIN, **{**FEATURES, **SLOW}[feature], parts=parts, moves=moves), undisturbed=True)


def check(feature: str, parts: int, **course: Any) -> None:
    """Compare bits of up to two parts, and up to rounding where more numbers are added."""
    setting = replace(PLAIN, **{**FEATURES, **SLOW}[feature], parts=parts, **course)
    shown, begins = trained(setting), tuple(first for first, _ in setting.calls())
    two = parts <= 2 and setting.accumulate == 1 and setting.model != "ragged"
    tolerance = 0.0 if two else 1e-9 if setting.double else 1e-3
    assert not shown.differences(undisturbed(feature, parts, begins), tolerance)
    assert bool(setting.faults) == ("worker death" in shown.recoveries)


@pytest.mark.parametrize(("feature", "course"), TABLE)
def test_whatever_happens_to_four_parts_numbers_differ_by_rounding_at_most(feature: str, course: str) -> None:
    check(feature, 4, **COURSES[course])


@pytest.mark.parametrize("feature", FEATURES)
def test_two_parts_are_equal_bit_by_bit(feature: str) -> None:
    check(feature, 2, moves=(Move(0, 1), Move(3, 2)))
    check(feature, 2, faults=KILLS[:2])


ALL = [*FEATURES, *(pytest.param(each, marks=pytest.mark.more) for each in SLOW)]
MARKS = {"dropout": (), "BatchNorm": pytest.mark.more}
SOME = [pytest.param(each, marks=MARKS.get(each, pytest.mark.nightly)) for each in FEATURES | SLOW]


@pytest.mark.parametrize("feature", ALL)
def test_scripts_that_are_killed_and_resumed(feature: str, tmp_path: Path) -> None:
    setting = replace(PLAIN, **{**FEATURES, **SLOW}[feature])
    every = [Fault("kill", "applied", rank=rank, step=step) for step in (2, 5) for rank in range(MOST)]
    compare(setting, *(resumed(setting, faults, tmp_path / str(len(faults))) for faults in (every, [])))


@pytest.mark.parametrize("feature", SOME)
def test_scripts_with_a_name_that_are_killed(feature: str) -> None:
    setting = replace(PLAIN, **{**FEATURES, **SLOW}[feature])
    compare(setting, *(taken_over(setting, ends) for ends in ((2, 5), ())))


def compare(setting: Setting, disturbed: Ended, undisturbed: Ended) -> None:
    (weights, states), (expected, same) = disturbed, undisturbed
    assert torch.allclose(weights, expected, rtol=1e-9, atol=1e-9 if setting.double else 1e-4)
    assert Shown(state=states).differences(Shown(state=same), 1e-9 if setting.double else 1e-3) == []


def resumed(setting: Setting, faults: list[Fault], folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """Let each script end when all workers fail, until one has trained all epochs."""
    given = {"checkpoints": AutoCheckpoint(path=folder, every=1), "resume": "auto"}
    for _ in range(3):
        with started(setting, Noted, faults, **given) as (cluster, run):
            try:
                return all_epochs(run)
            except RaysgdError:
                faults = [each for each in cluster.left if each.step > faults[0].step]
    raise AssertionError("the faults ended more scripts than there are")


def all_epochs(run: TorchTrainer) -> Ended:
    for _ in run.epochs(EPOCHS):
        run.train(max_retries=0)
        run.validate()
    state = run.state_dict()
    return weights_of(run), {name: state[name] for name in STATE if name in state}


class Killed(BaseException):
    """Ends a script."""


class Ends(Callback):
    """Ends the script when the driver hears of this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_progress(self, now: Any) -> None:
        if now.progress.step >= self.step:
            raise Killed


def taken_over(setting: Setting, ends: Sequence[int]) -> Ended:
    """Let scripts end at these steps of the run; the next one takes their workers over."""
    with Cluster(seed=setting.seed, room=setting.room):
        for step in ends:
            with suppress(Killed), trainer_of(setting, Noted, name="run", callbacks=[Ends(step)]) as run:
                all_epochs(run)
                raise AssertionError("this script ended by itself")
        with trainer_of(setting, Noted, name="run") as run:
            assert run.attached == bool(ends)
            return all_epochs(run)


class Classes(TrainingOperator):
    """Has a default `train_batch` whose criterion could count labels, and in the last step parts of 3 and 2 samples."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        criterion = nn.CrossEntropyLoss()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=criterion
        )
        x = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
        self.register_data(train_loader=DataLoader(TensorDataset(x, torch.arange(29) % 3), 6, shuffle=True))


@pytest.mark.parametrize("step", [1, 3])
def test_the_default_method_has_equal_bits_with_two_parts_of_other_sizes(step: int) -> None:
    found = []
    for struck in ([], [Fault("kill", "forward", rank=1, step=step)]):
        elastic = ElasticConfig(grow=False, hang_timeout_s=60)
        given: dict[str, Any] = {"num_workers": 2, "use_gpu": False, "seed": 3, "elastic": elastic}
        with Cluster(struck) as cluster, TorchTrainer(training_operator_cls=Classes, **given) as run:
            for _ in range(EPOCHS):
                run.train(max_retries=-1)
            assert not cluster.left
            found.append(weights_of(run))
    assert torch.equal(*found)


# -- more parts than workers -----------------------------------------------------------------------------

# The last step of an epoch has six samples, for eight parts.
FINER: dict[str, Any] = {"rows": 54, "batch": 4, "parts": 4, "finer": 8}


@cache
def undisturbed_in_eight(feature: str, begins: tuple[int, ...]) -> Shown:
    """Train four workers with two parts each, with calls that begin at these steps."""
    moves = tuple(Move(step, 4) for step in begins)
    return trained(replace(PLAIN, **FEATURES[feature], **FINER, moves=moves), undisturbed=True)


def check_eight(feature: str, **given: Any) -> None:
    setting = replace(PLAIN, **{**FEATURES[feature], **FINER, **given})
    shown, begins = trained(setting), tuple(first for first, _ in setting.calls())
    tolerance = 1e-9 if setting.double else 1e-3
    assert not shown.differences(undisturbed_in_eight(feature, begins), tolerance)
    assert bool(setting.faults) == ("worker death" in shown.recoveries)


FEW = ("BatchNorm", "dropout", "ragged token counts", "accumulation", "fp16")
WORKERS = {1: {"parts": 1, "batch": 16}, 2: {"parts": 2, "batch": 8}, 4: {"parts": 4, "batch": 4}}


@pytest.mark.parametrize("feature", FEW)
@pytest.mark.parametrize("workers", WORKERS)
def test_eight_parts_are_the_same_run_with_any_num_workers(feature: str, workers: int) -> None:
    check_eight(feature, **WORKERS[workers])


def test_two_parts_of_one_worker_have_the_bits_of_two_workers() -> None:
    one, two = (replace(PLAIN, **given) for given in ({"parts": 1, "batch": 4, "finer": 2}, {"parts": 2, "batch": 2}))
    assert not trained(one).differences(trained(two))


@pytest.mark.parametrize("feature", FEW)
@pytest.mark.parametrize("course", ["3 workers", "kills", "kills and replacements", "a load in mid-epoch"])
def test_eight_parts_of_a_batch_whatever_happens_to_four_workers(feature: str, course: str) -> None:
    check_eight(feature, **COURSES[course])


DEALS = tuple(
    Fault("kill", at, rank=rank, step=step) for at, rank, step in (("deals", 1, 1), ("dealt", 0, 3), ("deals", 0, 5))
)
SHARED: dict[str, dict[str, Any]] = {
    **{each: COURSES[each] for each in ("3 workers", "kills", "kills and replacements", "a load in mid-epoch")},
    "4 workers": {},
    "kills while they deal": {"faults": DEALS},
}
SHARES = ("BatchNorm", "dropout", "ragged token counts", "accumulation")


@pytest.fixture
def deals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let ranks have another speed in each step. Return the deals that follow from it, of each rank."""
    found: list[tuple[int, ...]] = []
    change = BySpeed.change

    def changed(policy: BySpeed, seconds: Sequence[float]) -> bool:
        changes = change(policy, seconds)
        found.extend([policy.deal] * changes)
        return changes

    def drawn(*_: Any) -> float:
        worker = Cluster.running.here
        return random.Random(f"{worker.host.rank} {worker.client.control.begun}").choice([0.1, 0.4, 1.6])

    def hit(*given: Any) -> list[float]:
        Cluster.running.point("deals")
        gathered = summed(*given)
        Cluster.running.point("dealt")
        return gathered

    monkeypatch.setattr("raysgd.core.decisions.dealing.EVERY", 1)
    monkeypatch.setattr("raysgd.core.decisions.dealing.MOST_DOUBLED", 0)
    monkeypatch.setattr("raysgd.torch.step.parts.dealing.summed", hit)
    monkeypatch.setattr(OwnSeconds, "of_part", drawn)
    monkeypatch.setattr(BySpeed, "change", changed)
    return found


@pytest.mark.parametrize("feature", SHARES)
@pytest.mark.parametrize("course", SHARED)
def test_shares_that_change_within_an_epoch(feature: str, course: str, deals: list[tuple[int, ...]]) -> None:
    check_eight(feature, shares="speed", **SHARED[course])
    assert deals or feature == "accumulation", "windows that a failure ends have too few steps"

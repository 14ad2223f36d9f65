"""A run is a function of its code, its data, its seed and its parts: whatever happens to its workers and its script, the weights,
buffers, rates and numbers are those of an undisturbed run."""

import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import AutoCheckpoint, RaysgdError
from tests.local.group import Fault
from tests.local.runs import weights_of
from tests.torch.schedules import EPOCHS, MOST, STATE, Move, Noted, Setting, Shown, started, trained

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
TABLE = [
    pytest.param(feature, course, id=f"{feature}-{course}", marks=[pytest.mark.more] if feature in SLOW else [])
    for feature in {**FEATURES, **SLOW}
    for course in COURSES
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("raysgd").disabled = True
    yield
    logging.getLogger("raysgd").disabled = False
    for child in multiprocessing.active_children():  # of ranks that have failed or left
        child.kill()
        child.join()


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


@pytest.mark.parametrize("feature", FEATURES)
def test_scripts_that_are_killed_and_resumed(feature: str, tmp_path: Path) -> None:
    setting = replace(PLAIN, **FEATURES[feature])
    every = [Fault("kill", "applied", rank=rank, step=step) for step in (2, 5) for rank in range(MOST)]
    (weights, states), (expected, same) = (
        resumed(setting, faults, tmp_path / str(len(faults))) for faults in (every, [])
    )
    assert torch.allclose(weights, expected, rtol=1e-9, atol=1e-9 if setting.double else 1e-4)
    assert Shown(state=states).differences(Shown(state=same), 1e-9 if setting.double else 1e-3) == []


def resumed(setting: Setting, faults: list[Fault], folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """Let each script end when all workers fail, until one has trained all epochs."""
    given = {"checkpoints": AutoCheckpoint(path=folder, every=1), "resume": "auto"}
    for _ in range(3):
        with started(setting, Noted, faults, **given) as (cluster, run):
            try:
                for _ in run.epochs(EPOCHS):
                    run.train(max_retries=0)
                    run.validate()
                state = run.state_dict()
                return weights_of(run), {name: state[name] for name in STATE if name in state}
            except RaysgdError:
                faults = [each for each in cluster.left if each.step > faults[0].step]
    raise AssertionError("the faults ended more scripts than there are")

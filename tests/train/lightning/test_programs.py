"""Any program of Lightning's parts, stopped anywhere, ends as one that was not stopped: weights, optimizers, schedulers, states of
callbacks, logged points and files. docs/from_lightning.md has the parts as a table."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from raysgd.train.elastic_state import Commit
from raysgd.train.sessions import Stopped, running
from tests.tiers import NIGHTLY
from tests.train.lightning.programs import drawn, fit
from tests.train.lightning.test_continuation import Recording

pytestmark = pytest.mark.usefixtures("group")


class Stopper:
    """Counts the places of a run, and stops the function at some of them."""

    def __init__(self, *stops: int) -> None:
        self.stops, self.places = {*stops}, 0

    def __reduce__(self) -> Any:
        raise TypeError("no commit has it")

    def __deepcopy__(self, memo: Any) -> "Stopper":
        return self

    def __call__(self) -> None:
        self.places += 1
        if self.places in self.stops:
            raise Stopped(asked=False)


def attempts(program: dict[str, Any], folder: Path, place: Stopper) -> tuple[dict[str, Any], int]:
    commit, rounds, number = Commit(), list[Any](), 0
    folder.mkdir()
    while True:
        number += 1
        try:
            with running(Recording(commit, rounds)):
                found = fit(program, folder, place)
        except Stopped:
            continue
        return {**found, "rounds": [(row["epoch"], row["step"]) for row, _ in rounds]}, number


def differences(seed: int, folder: Path) -> list[str]:
    """Return the names of results that differ after one to three stops."""
    program, choice, counted = drawn(seed), random.Random(seed + 1), Stopper()
    undisturbed, _ = attempts(program, folder / "undisturbed", counted)
    stops = Stopper(*choice.sample(range(1, counted.places + 1), choice.randint(1, 3)))
    found, number = attempts(program, folder / "stopped", stops)
    assert number == len(stops.stops) + 1
    return [name for name, value in undisturbed.items() if found[name] != value]


@pytest.mark.parametrize("seed", range(300 if NIGHTLY else 15))
def test_a_program_that_is_stopped_ends_as_one_that_is_not(seed: int, tmp_path: Path) -> None:
    assert differences(seed, tmp_path) == []

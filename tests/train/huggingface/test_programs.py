"""Random programs with a Hugging Face Trainer are stopped anywhere, and end as undisturbed."""

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.errors import ConfigError
from tests.replicas import FunctionRank, Interrupted
from tests.tiers import NIGHTLY
from tests.train.huggingface.programs import Average, Forgets, Noise, Program, differences


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[FunctionRank]:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # half of the time of a short training
    made = FunctionRank()
    yield made
    made.close()


class Stops:
    """Stops the function at the places with these numbers."""

    def __init__(self, rank: FunctionRank, numbers: list[int]) -> None:
        self.rank, self.numbers, self.count, self.places = rank, numbers, 0, list[str]()

    def __call__(self, where: str) -> None:
        self.count += 1
        if self.numbers and self.count == self.numbers[0]:
            self.numbers.pop(0)
            self.places.append(f"{where} ({self.count})")
            self.rank.interrupt()
            time.sleep(0.12)  # the signal comes here, if nothing holds it up


def run(rank: FunctionRank, program: Program, folder: Path, stops: Callable[[str], None]) -> Any:
    attempt = {"run": time.monotonic_ns(), "number": 1, "workers": program.workers}
    results: list[Any] = []

    def function() -> None:
        results.append(program.run(str(folder / "out"), lambda where: stops(where), attempt=attempt["number"]))

    folder.mkdir()
    while isinstance(rank.run(function, **attempt), Interrupted):
        rank.clear()
        attempt["number"] += 1
    return results[-1]


def check(rank: FunctionRank, number: int, folder: Path) -> list[str] | str:
    """Return where a program differs after stops from the undisturbed one, or how it was refused."""
    program, draw = Program(number), random.Random(number)
    counting = Stops(rank, [])
    undisturbed = run(rank, program, folder / "undisturbed", counting)
    numbers = sorted(draw.sample(range(1, counting.count + 1), draw.choice([1, 1, 2, 3])))
    stops = Stops(rank, numbers)
    try:
        found = run(rank, program, folder / "stopped", stops)
    except ConfigError as error:
        if {*program.callbacks} & {Average, Forgets, Noise}:
            return str(error)
        raise
    return [f"{each} after {stops.places}" for each in differences(undisturbed, found)]


@pytest.mark.parametrize("number", range(300 if NIGHTLY else 15))
def test_a_random_program(rank: FunctionRank, tmp_path: Path, number: int) -> None:
    found = check(rank, number, tmp_path)
    assert found == [] or "outside of optimizer.step()" in found


def main() -> None:
    import logging
    import tempfile
    import traceback

    logging.disable(logging.WARNING)
    gc.collect = lambda *_: 0  # type: ignore[assignment]
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for number in range(first, last):
        rank = FunctionRank()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                found: Any = check(rank, number, Path(folder))
            except Exception as error:
                found = [
                    f"{type(error).__name__}: {error}"[:600],
                    traceback.format_exc()[-700:] if not isinstance(error, ConfigError) else "",
                ]
        rank.close()
        print(
            number,
            "equal" if not found else f"refused {found[:90]}" if isinstance(found, str) else f"differs {found[:3]}",
            flush=True,
        )


if __name__ == "__main__":
    main()

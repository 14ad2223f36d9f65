"""Each program runs as a reader would run it, on two workers."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.background import Background

PROGRAMS = Path(__file__).resolve().parents[2] / "examples" / "programs"
# Options that make a run short, and the loss that falls in it.
RUNS = {
    "gpt.py": ("--windows 512 --validated 32 --length 32 --layers 2", "train_loss"),
    "resnet.py": ("--train 500 --held_out 100 --side 16", "train_loss"),
    "dcgan.py": ("--rings 500", "d_loss"),
    "text_classifier.py": ("--rows 300", "train_loss"),
    "keras_convnet.py": ("--rows 300", "train_loss"),
}
NEEDS = {"text_classifier.py": "transformers", "keras_convnet.py": "tensorflow"}


def run(background: Background, name: str) -> tuple[str, list[str]]:
    folder = background.folder()
    options = ["--workers", "2", "--epochs", "3", *RUNS[name][0].split()]
    done = background.run(str(PROGRAMS / name), *options, connected=True, folder=folder)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout, sorted(path.name for path in folder.rglob("*.p*"))


@pytest.mark.script(run=run)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if name == "gpt.py" else pytest.mark.nightly) for name in RUNS]
)
def test_each_program_is_a_script(name: str, outcome: Callable[[], tuple[str, list[str]]]) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"without {NEEDS[name]}")
    output, files = outcome()
    pattern = rf"^(?:train +)?epoch \d  .*\b{RUNS[name][1]}[ =]([\d.]+)"
    losses = [float(value) for value in re.findall(pattern, output, re.MULTILINE)]
    assert len(losses) == 3 and losses[-1] < losses[0], output
    if name == "dcgan.py":
        assert files == ["epoch_1.pgm", "epoch_2.pgm", "epoch_3.pgm"]
    if name == "resnet.py":
        assert re.search(r"^best  val_top1 0\.\d+$|^best  val_top1 1\.0+$", output, re.MULTILINE), output

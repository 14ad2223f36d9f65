"""As few frames lie between `train()` and `train_batch` as docs/structure.md says, and as few functions on the way of a batch."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRAMES = ROOT / "examples" / "benchmarks" / "frames.py"
PASSED = re.compile(r"to the next one: (\d+) in one process, and (\d+) on each of two workers")
SAID = re.compile(r"between `train\(\)`\s+and\s+`train_batch`: (\d+) on\s+the driver\s+and (\d+) in a worker")


def test_as_few_frames_lie_between_train_and_train_batch_as_the_page_says(ray_cluster: None) -> None:
    said = SAID.search((ROOT / "docs" / "structure.md").read_text(encoding="utf-8"))
    assert said is not None
    found = runpy.run_path(str(FRAMES))["looked"](inline=False)
    driver, worker = found["driver"], found["worker"]
    assert "torch/trainer.py" in driver[1] and "workers/actor.py" in worker[0] and "operator_base.py" in worker[-1]
    assert [len(driver), len(worker)] == [int(each) for each in said.groups()], found


def test_a_batch_passes_as_few_functions_as_the_page_says(ray_cluster: None) -> None:
    said = PASSED.search(re.sub(r"\s+", " ", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")))
    assert said is not None
    followed = runpy.run_path(str(FRAMES))["followed"]
    for inline, most in zip((True, False), said.groups(), strict=True):
        assert 20 < len(passed := followed(inline=inline)) <= int(most), passed

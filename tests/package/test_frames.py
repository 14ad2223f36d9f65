"""As few frames lie between `train()` and `train_batch` as docs/structure.md says, and as few functions on the way of a batch."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRAMES = ROOT / "examples" / "benchmarks" / "frames.py"
PASSED = re.compile(r"to the next one: (\d+) in one process, and (\d+) on each of two workers")
SAID = re.compile(r"between `train\(\)` and `train_batch`: (\d+) on the driver and (\d+) in a worker")


def test_as_few_frames_and_functions_as_the_page_says(ray_cluster: None) -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8"))
    said, passed = SAID.search(page), PASSED.search(page)
    assert said is not None and passed is not None
    looked = runpy.run_path(str(FRAMES))["looked"]
    found = {inline: looked(inline=inline) for inline in (True, False)}
    driver, worker = found[False]["driver"], found[False]["worker"]
    assert "torch/trainer.py" in driver[1] and "workers/actor.py" in worker[0] and "operator_base.py" in worker[-1]
    assert [len(driver), len(worker)] == [int(each) for each in said.groups()], found
    for inline, most in zip((True, False), passed.groups(), strict=True):
        assert 20 < len(functions := found[inline]["batch"]) <= int(most), functions

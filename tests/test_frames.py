"""Few frames lie between `train()` and `train_batch`, as docs/structure.md says."""

import runpy
from pathlib import Path

FRAMES = Path(__file__).resolve().parent.parent / "examples" / "benchmarks" / "frames.py"


def test_few_frames_lie_between_train_and_train_batch() -> None:
    """In this process, where they are one stack; with Ray, the actor's method is one more."""
    found = runpy.run_path(str(FRAMES))["looked"](inline=True)["inline"]
    assert "torch/trainer.py" in found[1] and "torch/operator.py" in found[-1]
    assert len(found) <= 12, found

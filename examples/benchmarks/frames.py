"""Print raysgd's Python frames between `trainer.train()` and the operator's `train_batch`, on the driver and in a
worker.

Each frame is one more step for a reader of a traceback or of the code. With `--inline` the one worker is this
process, and both parts are one stack.

    python examples/benchmarks/frames.py
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd import TorchTrainer, TrainingOperator
from raysgd.workers.ray_group import RayGroup

PACKAGE = Path(raysgd.__file__).parent


def frames() -> list[str]:
    """Return raysgd's frames on the stack of this thread, the outermost first, without the one that started this process."""
    stack = [(Path(frame.filename), frame) for frame in traceback.extract_stack()]
    own = [(file, frame) for file, frame in stack if PACKAGE in file.parents and file.name != "fork_server.py"]
    return [f"{file.relative_to(PACKAGE)}:{frame.lineno} {frame.name}" for file, frame in own]


class Looking(TrainingOperator):
    """Keeps the frames under its `train_batch`."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.frames = frames()
        return super().train_batch(batch, batch_info)


def looked(*, inline: bool) -> dict[str, list[str]]:
    """Train one epoch, with two workers or inline. Return the frames of each process."""
    sent: list[list[str]] = []
    submit = RayGroup.submit

    def submit_and_look(group: RayGroup, worker: str, verb: str, arguments: dict[str, Any], **more: Any) -> int:
        if verb == "run":
            sent.append([*frames(), "workers/ray_group.py RayGroup.submit"])
        return submit(group, worker, verb, arguments, **more)

    RayGroup.submit = submit_and_look  # type: ignore[method-assign]
    try:
        workers = {"num_workers": 1, "use_ray": False} if inline else {"num_workers": 2}
        with TorchTrainer(training_operator_cls=Looking, **workers) as trainer:
            trainer.train()
            driver = sent[0] if sent else []
            worker = trainer.apply_all_operators(lambda operator: operator.frames)[0]
    finally:
        RayGroup.submit = submit  # type: ignore[method-assign]
    return {"inline": worker} if inline else {"driver": driver, "worker": worker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inline", action="store_true", help="train in this process, without Ray")
    found = looked(inline=parser.parse_args().inline)
    for process, lines in found.items():
        print(f"{process}: {len(lines)} frames", *lines, sep="\n  ")
    print(f"{sum(map(len, found.values()))} frames of raysgd between the script and train_batch")


if __name__ == "__main__":
    main()
